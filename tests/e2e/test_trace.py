"""The overlap that `bench.trace` counts, on traces that are made up; the real ones need a GPU."""

from __future__ import annotations

from typing import Any

from bench.trace import DAEMON_PID, idle, kernels, merged, overlap


def span(pid: int, cat: str, name: str, begin: float, end: float) -> dict[str, Any]:
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "pid": pid, "tid": 7, "cat": cat, "name": name, **times}


CLIENT = {
    "baseTimeNanoseconds": 5_000_000,
    "traceEvents": [
        span(10, "cpu_op", "step", 0, 10_000),
        span(0, "kernel", "gemm", 1_000, 3_000),
        span(0, "kernel", "gemm", 2_500, 4_000),
        span(0, "kernel", "norm", 6_000, 7_000),
    ],
}
DAEMON = {
    "baseTimeNanoseconds": 4_000_000,  # 1,000 us before the client's: shown times are less by that
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python3"}},
        span(0, "kernel", "encode", 3_000, 3_500),
        span(0, "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4_500, 6_000),
        span(0, "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7_500, 9_500),
        span(0, "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 40_000, 41_000),
    ],
}


def test_the_daemons_events_are_brought_to_the_clients_time() -> None:
    events = merged(CLIENT, DAEMON)["traceEvents"]
    theirs = [event for event in events if event["pid"] >= DAEMON_PID]
    assert theirs[0]["args"]["name"] == "stormd: python3"
    assert [event["ts"] for event in theirs[1:]] == [2_000, 3_500, 6_500]  # the last is too late


def test_overlap_is_what_is_in_both() -> None:
    assert overlap(merged(CLIENT, DAEMON)) == {
        "client_kernel_ms": 4.0,
        "client_idle_ms": 2.0,
        "download_ms": 1.5,
        "download_beside_kernels_ms": 0.5,
        "upload_ms": 2.0,
        "upload_beside_kernels_ms": 0.5,
        "codec_ms": 0.5,
        "codec_beside_kernels_ms": 0.5,
    }


def test_when_the_client_is_idle_and_what_runs() -> None:
    trace = merged(CLIENT, DAEMON)
    # After how many ms, for how many, and what comes next.
    assert idle(trace) == {"kernels": [(3.0, 2.0, "norm")], "download": [], "upload": []}
    found = kernels(trace)
    assert found["stormd: encode"] == [1, 0.5]
    assert found["norm"] == [1, 1.0]


def test_what_runs_while_the_link_is_idle() -> None:
    copy = "Memcpy HtoD (Pinned -> Device)"
    more = [span(0, "gpu_memcpy", copy, 3_200, 3_300), span(0, "gpu_memcpy", copy, 4_000, 4_100)]
    trace = merged(CLIENT, {**DAEMON, "traceEvents": DAEMON["traceEvents"] + more})
    assert idle(trace)["upload"] == [(1.3, 0.7, "gemm"), (2.1, 3.4, "gemm")]


def test_a_trace_without_kernels() -> None:
    empty = {"baseTimeNanoseconds": 0, "traceEvents": [span(10, "cpu_op", "step", 0, 10)]}
    assert idle(empty) == {}
