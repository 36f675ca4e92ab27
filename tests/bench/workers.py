"""A trainer a GPU: one daemon with a worker each, one process for all, or a daemon each.

    stormd run --mps=on -- python tests/bench/workers.py --workload W1 --json FILE
    python tests/bench/workers.py --ranks 2 --workload W0 --warm-ups 3 --turns 1      # on a CPU

The daemon that `stormd run` starts has nothing to do; it is there for MPS. The arrangements take
turns. A row has the median step of each trainer, and the processor time that daemons took a second
for each GPU; `ratios` are to a daemon each, which shares nothing but the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_bench.train.workloads import WORKLOADS

from stormd.machine import describe, package_versions
from stormd.query import ADDRESS_VARIABLE

GIB = 1 << 30
ARRANGEMENTS = ("workers", "one", "apart")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def daemons(name: str, options: argparse.Namespace) -> Iterator[list[ChildDaemon]]:
    """Yield the daemon of each rank, which may be one for all."""
    ranks, pool = options.ranks, options.pool_bytes
    flags = [f"--device={options.device}", "--cache-bytes=0"]
    with ExitStack() as stack:
        if name == "apart":
            made = []
            for rank in range(ranks):
                with visible(rank):
                    daemon = ChildDaemon(flags=[*flags, f"--pool-bytes={pool // ranks}"])
                    made.append(stack.enter_context(daemon))
            yield made
            return
        workers = str(ranks) if name == "workers" else "off"
        daemon = ChildDaemon(flags=[*flags, f"--pool-bytes={pool}", f"--workers={workers}"])
        yield [stack.enter_context(daemon)] * ranks


@contextmanager
def visible(rank: int) -> Iterator[None]:
    """Have what is started meanwhile see one GPU."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = str(rank)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a step takes each of the trainers, all of which train at once."""
    with daemons(name, options) as served, tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / f"{rank}.json" for rank in range(options.ranks)]
        before, began = processor_seconds(served), time.monotonic()
        trainers = [
            start(rank, daemon.address, file, options)
            for rank, (daemon, file) in enumerate(zip(served, files, strict=True))
        ]
        try:
            for trainer in trainers:
                if trainer.wait(options.timeout):
                    raise RuntimeError(f"a trainer ended with status {trainer.returncode}")
        finally:
            for trainer in trainers:
                trainer.kill()
        seconds = time.monotonic() - began
        taken = processor_seconds(served) - before
        rows = [json.loads(file.read_text())["rows"] for file in files]
    return {
        "arrangement": name,
        "ms": [row["ms"] for own in rows for row in own if "ms" in row],
        "peak_gib": [row["peak_gib"] for own in rows for row in own if "ms" in row],
        "processors_a_gpu": round(taken / seconds / options.ranks, 3),
    }


def start(
    rank: int, address: str, file: Path, options: argparse.Namespace
) -> subprocess.Popen[bytes]:
    """Start a trainer on the GPU of its number."""
    script = Path(__file__).parent / "in_turns.py"
    command = [sys.executable, str(script), "--workload", options.workload, "--methods", "storm"]
    command += ["--turns", "1", "--steps", str(options.steps), "--json", str(file)]
    command += ["--warm-ups", str(options.warm_ups)]
    with visible(rank):
        environ = os.environ | {ADDRESS_VARIABLE: address}
        return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)


def processor_seconds(served: list[ChildDaemon]) -> float:
    """Return what all processes of these daemons have taken; those that have ended count not."""
    total = 0.0
    for pid in {daemon.pid for daemon in served}:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="W1")
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--arrangements", nargs="+", choices=ARRANGEMENTS, default=ARRANGEMENTS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-ups", type=int, default=45)
    parser.add_argument("--pool-bytes", type=int, default=None, help="of all ranks together")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one turn")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.pool_bytes = options.pool_bytes or 24 * GIB * options.ranks
    rows = []
    for turn in range(options.turns):
        for name in options.arrangements:
            rows.append({"turn": turn, **measure(name, options)})
            print(json.dumps(rows[-1]), flush=True)
    medians = {
        name: statistics.median(
            ms for row in rows if row["arrangement"] == name for ms in row["ms"]
        )
        for name in options.arrangements
    }
    ratios = {name: round(ms / medians.get("apart", ms), 4) for name, ms in medians.items()}
    print(json.dumps({"median_ms": medians, "ratios": ratios}))
    if options.json:
        command = " ".join(["python tests/bench/workers.py", *sys.argv[1:]])
        machine = describe() | {"command": command, "versions": package_versions(("torch",))}
        found = {"machine": machine, "rows": rows, "median_ms": medians, "ratios": ratios}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
