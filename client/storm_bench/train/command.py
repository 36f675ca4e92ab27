"""`stormd bench train`: step time and peak memory of one training step, by method.

All rows are measured with one daemon, in one run on one machine. Each row has a process of its own,
unless methods are measured together: that is quicker if making a model takes longer than training
it. A method that cannot run here is in the table with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

import psutil

from storm_bench.child_daemon import ChildDaemon, tail
from storm_bench.devices import FREES_AT_ONCE, MPS, compile_codec, device_here, mps_is_on
from storm_bench.interrupts import noted_interrupts
from storm_bench.pictures import draw_train, total_bytes
from storm_bench.rows import Column, in_short, print_table, ratio_to
from storm_bench.train import BUDGET_PREFIX, again, plain_seconds
from stormd.commands.arguments import check_picture, positive_int, valid_budget
from stormd.machine import memory_limit
from stormd.monitoring.nvml import Nvml, open_nvml
from stormd.output import write_line
from stormd.sizes import parse_size

__all__ = ["METHODS", "WORKLOADS", "add_train_arguments", "measure_train", "print_train"]

WORKLOADS: Final = {
    "W0": "width 256, 4 layers, 2 x 1024 tokens",
    "W1": "width 4096, 8 layers, 2 x 4096 tokens",
    "W2": "width 8192, 4 layers, 1 x 4096 tokens",
    "W3": "width 4096, 4 layers, 1 x 32768 tokens",
    "llama": "8 layers of Llama 8B, 2 x 4096 tokens, AdamW",
    "llama-long": "4 layers of Llama 8B, 1 x 32768 tokens, AdamW",
    "llama-lora": "8 layers of Llama 8B, 2 x 4096 tokens, LoRA of rank 16",
    "llama-small": "width 1024, 12 layers, 8 x 512 tokens, AdamW",
}
_WORKLOADS_OF: Final = {"cpu": ["W0"], "cuda": ["W1", "W2", "W3"]}
METHODS: Final = (
    "none",
    "checkpoint",
    "checkpoint-tiled-loss",
    "checkpoint-on-cpu",
    "selective",
    "save-on-cpu",
    "trl",
    "torchtune",
    "storm",
    "storm-no-replay",
    "storm-raw",
    "storm-checkpoint",
    "gated",
    "storm-gated",
)

_CHILD_SECONDS: Final = 300.0
_START_SECONDS: Final = 120.0
_GIB: Final = 1 << 30


def add_train_arguments(train: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is to be measured, and how."""
    train.add_argument(
        "--workloads",
        nargs="+",
        choices=tuple(WORKLOADS),
        help="; ".join(f"{name}: {text}" for name, text in WORKLOADS.items())
        + " (default: W1 W2 W3 on a GPU, else W0)",
    )
    train.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="ways to train (default: all)",
    )
    train.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    train.add_argument("--steps", type=positive_int, default=4, help="the median of these counts")
    train.add_argument("--warm-ups", type=positive_int, default=8, help="steps before them")
    train.add_argument(
        "--budgets",
        nargs="+",
        type=valid_budget,
        default=[],
        metavar="BUDGET",
        help="also measure storm with each of these: 0.5, 4GiB, fit (default: none)",
    )
    train.add_argument(
        "--together",
        action="store_true",
        help="measure all methods of a workload in one process, on one model, that without offload "
        "once more at the end, since cards slow down as they get warm (default: no)",
    )
    train.add_argument(
        "--pool-bytes", metavar="SIZE", help="the daemon's pool (default: by workload)"
    )
    train.add_argument(
        "--daemon-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="one more for the daemon, as --daemon-flag=--part-bytes-cuda=16MiB; may be repeated "
        "(default: none)",
    )
    train.add_argument(
        "--image", metavar="FILE", help="draw step time against peak memory (default: no)"
    )


def measure_train(args: argparse.Namespace) -> dict[str, Any]:
    """Run every method on every workload and return the figures; draw them if requested.

    Each row is reported on standard error once it is measured. SIGINT or SIGTERM leaves out the
    other rows: the figures then say "interrupted".

    Raises:
        ConfigError: the requested picture could not be written.
        ChildFailed: the daemon or the compiler could not do its work.
    """
    check_picture(args.image)
    methods = [*args.methods, *(f"{BUDGET_PREFIX}{text}" for text in args.budgets)]
    device = device_here(args.device)
    pool = parse_size(args.pool_bytes) if args.pool_bytes else _pool_bytes(device)
    flags = [f"--pool-bytes={pool}", f"--device={device}", "--cache-bytes=0", *args.daemon_flag]
    if device == "cuda":
        compile_codec()
    rows: dict[str, dict[str, Any]] = {
        name: {method: {"skipped": "interrupted before"} for method in methods}
        for name in args.workloads or _WORKLOADS_OF[device]
    }
    figures: dict[str, Any] = {"device": device, "mps": mps_is_on(device), "daemon_flags": flags}
    figures |= {"interrupted": False, "workloads": rows}
    try:
        with (
            noted_interrupts() as interrupts,
            ChildDaemon(flags=flags, start_seconds=_START_SECONDS) as daemon,
        ):
            bench = _Bench(daemon, device, args.warm_ups, args.steps, open_nvml())
            for name, table in rows.items():
                last = ["none"] if args.together and "none" in methods[:-1] else []
                with closing(bench.rows(name, methods + last, together=args.together)) as measured:
                    for number, (method, row) in enumerate(measured):
                        if number == len(methods):
                            table[method] |= again(row)
                        else:
                            table[method] = row
                        sys.stderr.write(f"{name} {method}: {_short(row)}\n")
                        interrupts.check()
    except KeyboardInterrupt:
        figures["interrupted"] = True
    if args.image:
        draw_train(figures, Path(args.image))
    return figures


@dataclass(frozen=True, slots=True)
class _Bench:
    """Measures rows against one daemon."""

    daemon: ChildDaemon
    device: str
    warm_ups: int
    steps: int
    nvml: Nvml | None

    def rows(
        self, workload: str, methods: list[str], *, together: bool
    ) -> Generator[tuple[str, dict[str, Any]]]:
        """Yield each method with its figures, or with {"skipped": reason}."""
        left = list(methods)
        while left:
            done = 0
            for row in self._measured(workload, left if together else left[:1]):
                yield left[done], row
                done += 1
            del left[:done]

    def _measured(self, workload: str, methods: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the figures of methods in one process, and stop early if that process ends."""
        with (
            TemporaryFile("w+") as complaints,
            subprocess.Popen(  # noqa: S603 - our own module and flags
                self._command(workload, methods),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env=os.environ | FREES_AT_ONCE,
            ) as process,
        ):
            try:
                for number in range(len(methods)):
                    before = self._effort()
                    figures = _answer(process, complaints)
                    if "step_seconds" in figures:
                        figures |= self._seen_from_outside(process.pid, figures, before)
                    yield figures
                    if process.poll() is not None:
                        return
                    _continue_child(process, is_last=number + 1 == len(methods))
            except BaseException:
                process.kill()
                raise

    def _command(self, workload: str, methods: list[str]) -> list[str]:
        values = {
            "workload": workload,
            "device": self.device,
            "address": self.daemon.address,
            "warm-ups": self.warm_ups,
            "steps": self.steps,
        }
        flags = [f"--{name}={value}" for name, value in values.items()]
        return [sys.executable, "-m", "storm_bench.train", *flags, "--methods", *methods]

    def _effort(self) -> tuple[float, int]:
        """Return the daemon's processor time in seconds, and the count of its operations."""
        status = self.daemon.status()
        times = [psutil.Process(pid).cpu_times() for pid in self._daemon_pids(status)]
        seconds = sum(one.user + one.system for one in times)
        return seconds, sum(flow["operations"] for flow in status["throughput"].values())

    def _daemon_pids(self, status: dict[str, Any]) -> list[int]:
        """Return the daemon's processes: itself, and its workers where it has one a GPU."""
        return [self.daemon.pid, *(one["pid"] for one in status["workers"] if one["pid"])]

    def _seen_from_outside(
        self, pid: int, figures: dict[str, Any], before: tuple[float, int]
    ) -> dict[str, Any]:
        """Return the memory of both processes on the GPU, and the daemon's work per operation.

        All of the daemon's processor time is counted, so short runs show too much.
        """
        seconds, operations = self._effort()
        done = operations - before[1]
        uuid = figures.get("device_uuid")
        by_pid = (self.nvml.process_bytes(uuid) if self.nvml and uuid else None) or {}
        daemon = [by_pid[one] for one in self._daemon_pids(self.daemon.status()) if one in by_pid]
        return {
            "process_device_bytes": by_pid.get(pid),
            "daemon_device_bytes": sum(daemon) if daemon else None,
            "daemon_operations": done,
            "daemon_seconds_per_operation": (seconds - before[0]) / done if done else None,
        }


def _answer(process: subprocess.Popen[str], complaints: IO[str]) -> dict[str, Any]:
    """Return a child's next figures; the child keeps its memory until it is told to continue.

    If it gives none, return {"skipped": reason}, where the reason is from `complaints`.
    """
    timer = threading.Timer(_CHILD_SECONDS, process.kill)
    timer.daemon = True  # an interrupt right after its start leaves it running
    try:
        timer.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            figures: dict[str, Any] = json.loads(line)
            return figures
    finally:
        timer.cancel()
    status = process.wait()
    complaints.seek(0)
    complaint = tail(complaints.read(), lines=3)
    if status < 0:
        return {"skipped": f"killed, or not done after {_CHILD_SECONDS:g} s: {complaint}"}
    return {"skipped": complaint}


def _continue_child(process: subprocess.Popen[str], *, is_last: bool) -> None:
    """Tell a child that has answered to measure the next method, or to end; its row is kept."""
    assert process.stdin is not None
    try:
        if not is_last:
            process.stdin.write("\n")
            process.stdin.flush()
            return
        process.communicate(timeout=_CHILD_SECONDS)
    except BrokenPipeError:
        process.wait()  # the next answer says why it has ended
    except subprocess.TimeoutExpired:
        process.kill()


def _pool_bytes(device: str) -> int:
    """Return a pool size for the largest workload, but at most half of this machine's memory."""
    return min((32 if device == "cuda" else 1) * _GIB, memory_limit() // 2)


# --- for people -----------------------------------------------------------------------------

_COLUMNS: Final = (
    Column("step ms", lambda row: row["step_seconds"], 1e3),
    Column("x none", lambda row: row["of_none"]),
    Column("forward", lambda row: row["forward_seconds"], 1e3),
    Column("backward", lambda row: row["backward_seconds"], 1e3),
    Column("peak GiB", lambda row: row["peak_bytes"], 1 / _GIB),
    Column("process GiB", lambda row: row["process_device_bytes"], 1 / _GIB),
    Column("daemon GiB", lambda row: row["daemon_device_bytes"], 1 / _GIB),
    Column("total GiB", total_bytes, 1 / _GIB),
    Column("offload GiB", lambda row: row["offload"]["offloaded_bytes"], 1 / _GIB),
    Column("ratio", lambda row: row["offload"]["ratio"]),
    Column("daemon us", lambda row: row["daemon_seconds_per_operation"], 1e6),
)


def print_train(figures: dict[str, Any]) -> None:
    """Print a table per workload, and an explanation of the columns."""
    mps = MPS[figures["mps"]]
    for name, rows in figures["workloads"].items():
        write_line(f"{name}: {WORKLOADS[name]}, {_device_name(rows, figures['device'])}{mps}")
        plain = plain_seconds(rows)
        compared = ((name, ratio_to(plain, row, "step_seconds")) for name, row in rows.items())
        print_table(compared, _COLUMNS)
        write_line()
    peak = "PyTorch's" if figures["device"] == "cuda" else "the process's resident"
    write_line(
        f"peak: {peak} most bytes in the measured steps; process and daemon: GPU memory that they "
        "hold after them; total: what the method takes of it, without a daemon that it does not "
        "use; offload: what was offloaded, before encoding; daemon us: its processor time per chunk"
    )


def _device_name(rows: dict[str, dict[str, Any]], default: str) -> str:
    return next((row["device_name"] for row in rows.values() if "device_name" in row), default)


def _short(row: dict[str, Any]) -> str:
    return in_short(row, 1e3 * row.get("step_seconds", 0), row.get("peak_bytes", 0) / _GIB)
