"""Training steps as torch.profiler sees them, with the daemon's work on the same time line.

    PYTHONPATH=tests python -m bench.trace --workload W1 --budgets none least 0.5 \\
        --traces . --json overlap.json
    PYTHONPATH=tests python -m bench.trace --workload llama-long --compiled --budgets none 0.0

With --compiled each block is compiled, and a budget is that of `storm.compile`, a fraction of what
a graph saves.

The daemon runs under a profiler of its own; both traces are merged into one a budget that Perfetto
and chrome://tracing open. What stays true: times are those that the GPU's own tracing gives, in
both processes by one clock, and all is counted from what is in the trace and nothing else.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import storm_client as storm
import torch
from bench.recording import parser_of, record
from storm_bench.devices import device_here
from storm_bench.train.gpt import attention
from storm_bench.train.llama import Llama
from storm_bench.train.methods import MIN_BYTES
from storm_bench.train.workloads import WORKLOADS, Training, make, plain_loss
from storm_client.transport.handshake import is_listening
from support.waiting import wait_until
from torch import nn
from torch.profiler import ProfilerActivity, profile

from stormd import cli
from stormd.protocol import parse_budget

Span = tuple[float, float]
Events = list[dict[str, Any]]
START_SECONDS = 180.0
WARM_UPS = 60
"""Steps before the one that is traced: plans of steps have settled by then."""
NONE = "none"
LONGEST = 20
"""Kernels, and times without any, that are told."""
DAEMON_PID = 1_000_000_000
"""Added to the daemon's process numbers, which a trace also uses for GPUs: they stay apart."""


def traced_daemon(address: str, device: str, pool: str, path: str) -> None:
    """Serve until SIGTERM under a profiler; write its trace then."""
    with _profiled() as profiled:
        flags = [f"--device={device}", f"--pool-bytes={pool}", "--cache-bytes=0"]
        cli.main(["serve", "--address", address, *flags])
    profiled.export_chrome_trace(path)


def traced_steps(
    address: str,
    device: torch.device,
    workload: str,
    budgets: list[str],
    directory: Path,
    *,
    compiled: bool,
    warm_ups: int = WARM_UPS,
) -> None:
    """With each budget take some steps, and write the trace of one more."""
    training = make(WORKLOADS[workload], device)
    for budget in budgets:
        if compiled:
            training = make(WORKLOADS[workload], device)
        with ExitStack() as entered:
            context = _compiled if compiled else _context
            offload = entered.enter_context(context(budget, training, address))
            entered.enter_context(attention(device))
            for _ in range(warm_ups):
                _step(training, offload)
            with _profiled() as profiled:
                _step(training, offload)
        profiled.export_chrome_trace(str(directory / f"{budget}.json"))


@contextmanager
def _compiled(
    budget: str, training: Training, address: str
) -> Iterator[AbstractContextManager[object]]:
    """Have each block be compiled, with offload unless there is to be none; as `_context`."""
    net = training.net
    blocks = net.net.model.layers if isinstance(net, Llama) else training.net.blocks
    assert isinstance(blocks, nn.ModuleList)
    torch._dynamo.reset()
    if budget == NONE:
        for place, block in enumerate(blocks):
            blocks[place] = torch.compile(block)
        yield nullcontext()
        return
    with storm.connect(address, embedded="never", timeout=60.0) as client:
        for place, block in enumerate(blocks):
            blocks[place] = storm.compile(
                block, budget=float(budget), client=client, min_bytes=MIN_BYTES
            )
        yield nullcontext()


@contextmanager
def _context(
    budget: str, training: Training, address: str
) -> Iterator[AbstractContextManager[object]]:
    """Yield what a forward pass runs in."""
    if budget == NONE:
        yield nullcontext()
        return
    with storm.connect(address, embedded="never", timeout=60.0) as client:
        yield client.offload(training.module, min_bytes=MIN_BYTES, budget=parse_budget(budget))


def _step(training: Training, offload: AbstractContextManager[object]) -> None:
    x = training.net.embed(training.tokens)
    with offload:
        for block in training.net.blocks:
            x = block(x)
        loss = plain_loss(training.net, x, training.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    if training.optimizer is not None:
        training.optimizer.step()
    training.module.zero_grad(set_to_none=True)
    if training.tokens.is_cuda:
        torch.cuda.synchronize()


def _profiled() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


@contextmanager
def daemon(device: str, pool: str, directory: Path) -> Iterator[str]:
    """Run a daemon under the profiler; its trace is in `directory` when the context is left."""
    address = f"ipc://{directory}/stormd.sock"
    path = str(directory / "daemon.json")
    command = [sys.executable, "-m", "bench.trace", "--daemon", address, device, pool, path]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: is_listening(address) or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, "the daemon has ended"
        yield address
        process.send_signal(signal.SIGTERM)
        process.wait(START_SECONDS)
    finally:
        process.kill()
        process.wait()


def merged(client: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the client's trace with what the daemon did meanwhile."""
    shift = (other["baseTimeNanoseconds"] - client["baseTimeNanoseconds"]) / 1e3
    spans = [_span(event) for event in client["traceEvents"] if event.get("ph") == "X"]
    begin, end = min(one for one, _ in spans), max(other for _, other in spans)
    events = []
    for event in other["traceEvents"]:
        moved = dict(event)
        if isinstance(event.get("pid"), int):
            moved["pid"] = event["pid"] + DAEMON_PID
        if event.get("ph") == "M":
            events.append(_named(moved))
        elif event.get("ph") == "X":
            moved["ts"] = event["ts"] + shift
            if begin <= moved["ts"] <= end:
                events.append(moved)
    return {**client, "traceEvents": client["traceEvents"] + events}


def overlap(trace: dict[str, Any]) -> dict[str, float]:
    """Return how much of the daemon's copies and kernels ran beside the client's kernels."""
    mine = [event for event in trace["traceEvents"] if not _is_daemons(event)]
    theirs = [event for event in trace["traceEvents"] if _is_daemons(event)]
    compute = _union(_spans(mine, "kernel"))
    result = {"client_kernel_ms": _length(compute), "client_idle_ms": _length(_between(compute))}
    kinds = {"download": "DtoH", "upload": "HtoD"}
    for name, mark in kinds.items():
        copies = _union(_spans(theirs, "gpu_memcpy", mark))
        result[f"{name}_ms"] = _length(copies)
        result[f"{name}_beside_kernels_ms"] = _length(_both(copies, compute))
    coding = _union(_spans(theirs, "kernel"))
    result["codec_ms"] = _length(coding)
    result["codec_beside_kernels_ms"] = _length(_both(coding, compute))
    return {name: round(value, 3) for name, value in result.items()}


def idle(trace: dict[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """Return the longest times without a kernel of the client, and between copies each way.

    Each after how many ms of the step, for how many, and what the client runs next, or then.
    """
    mine = [event for event in trace["traceEvents"] if not _is_daemons(event)]
    theirs = [event for event in trace["traceEvents"] if _is_daemons(event)]
    named = sorted(
        (*_span(event), event["name"][:40])
        for event in mine
        if event.get("ph") == "X" and event.get("cat") == "kernel"
    )
    if not named:
        return {}
    begin, ends = named[0][0], [end for _, end, _ in named]

    def longest(spans: list[Span]) -> list[tuple[float, float, str]]:
        gaps = sorted(_between(spans), key=lambda gap: gap[0] - gap[1])[:LONGEST]
        found = []
        for one, other in sorted(gaps):
            place = min(bisect_right(ends, one), len(named) - 1)
            found.append(
                (round((one - begin) / 1e3, 3), round((other - one) / 1e3, 3), named[place][2])
            )
        return found

    return {
        "kernels": longest(_union(_spans(mine, "kernel"))),
        "download": longest(_union(_spans(theirs, "gpu_memcpy", "DtoH"))),
        "upload": longest(_union(_spans(theirs, "gpu_memcpy", "HtoD"))),
    }


def kernels(trace: dict[str, Any]) -> dict[str, list[float]]:
    """Return of the kernels that took longest together how many there were, and their ms."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            name = ("stormd: " if _is_daemons(event) else "") + event["name"][:60]
            found[name][0] += 1
            found[name][1] += event["dur"] / 1e3
    longest = sorted(found.items(), key=lambda item: -item[1][1])[:LONGEST]
    return {name: [count, round(ms, 3)] for name, (count, ms) in longest}


def _is_daemons(event: dict[str, Any]) -> bool:
    return isinstance(event.get("pid"), int) and event["pid"] >= DAEMON_PID


def _named(event: dict[str, Any]) -> dict[str, Any]:
    """Return a naming event of the daemon's that says so."""
    if event.get("name") == "process_name":
        return {**event, "args": {"name": f"stormd: {event['args']['name']}"}}
    return event


def _spans(events: Events, category: str, mark: str = "") -> list[Span]:
    return [
        _span(event)
        for event in events
        if event.get("ph") == "X" and event.get("cat") == category and mark in event["name"]
    ]


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event.get("dur", 0)


def _union(spans: list[Span]) -> list[Span]:
    """Return disjoint spans, in order, that cover the same times."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _both(some: list[Span], others: list[Span]) -> list[Span]:
    """Return the times that are in both; each must be disjoint and in order."""
    found, place = [], 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            found.append((max(begin, others[at][0]), min(end, others[at][1])))
            at += 1
    return found


def _between(spans: list[Span]) -> list[Span]:
    """Return the times between spans that are disjoint and in order."""
    return [(one[1], other[0]) for one, other in pairwise(spans)]


def _length(spans: list[Span]) -> float:
    """Return milliseconds."""
    return sum(end - begin for begin, end in spans) / 1e3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", choices=tuple(WORKLOADS))
    parser.add_argument("--budgets", nargs="+", default=["least"], help=f"{NONE!r}: no offload")
    parser.add_argument("--compiled", action="store_true", help="block by block")
    parser.add_argument("--warm-ups", type=int, default=WARM_UPS)
    parser.add_argument("--pool", default="16GiB")
    parser.add_argument("--traces", type=Path, help="the folder where the merged traces go")
    parser.add_argument("--daemon", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.daemon:
        traced_daemon(*args.daemon)
        return
    device = device_here()
    workload = args.workload or ("W1" if device == "cuda" else "W0")
    with tempfile.TemporaryDirectory(prefix="storm-") as base:
        directory = Path(base)
        with daemon(device, args.pool, directory) as address:
            where = torch.device(device)
            traced_steps(
                address,
                where,
                workload,
                args.budgets,
                directory,
                compiled=args.compiled,
                warm_ups=args.warm_ups,
            )
        theirs = json.loads((directory / "daemon.json").read_text())
        traces = {
            budget: merged(json.loads((directory / f"{budget}.json").read_text()), theirs)
            for budget in args.budgets
        }
    figures = {
        budget: {**overlap(trace), "longest_idle_ms": idle(trace), "kernels": kernels(trace)}
        for budget, trace in traces.items()
    }
    if args.traces:
        for budget, trace in traces.items():
            (args.traces / f"{workload}-{budget}.json").write_text(json.dumps(trace))
    record(args.json, {"workload": workload, "figures": figures})
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
