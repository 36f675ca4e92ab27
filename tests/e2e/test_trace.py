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


def test_overlap_is_what_is_in_both_and_idle_what_is_in_neither() -> None:
    trace = merged(CLIENT, DAEMON)
    theirs = [event for event in trace["traceEvents"] if event["pid"] >= DAEMON_PID]
    assert theirs[0]["args"]["name"] == "stormd: python3"
    assert [event["ts"] for event in theirs[1:]] == [2_000, 3_500, 6_500]  # the last is too late
    assert overlap(trace) == {
        "client_kernel_ms": 4.0,
        "client_idle_ms": 2.0,
        "download_ms": 1.5,
        "download_beside_kernels_ms": 0.5,
        "upload_ms": 2.0,
        "upload_beside_kernels_ms": 0.5,
        "codec_ms": 0.5,
        "codec_beside_kernels_ms": 0.5,
    }
    # After how many ms, for how many, and what comes next.
    assert idle(trace) == {"kernels": [(3.0, 2.0, "norm")], "download": [], "upload": []}
    found = kernels(trace)
    assert found["stormd: encode"] == [1, 0.5]
    assert found["norm"] == [1, 1.0]
