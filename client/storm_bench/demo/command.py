"""`stormd demo`: shows that two trainers with offload train exactly as two without.

The exit status is 1 exactly when a loss or gradient differs, a trainer offloaded nothing, or bytes
were left in the pool. `--json` prints the table's figures. `--past-vram` runs another demo, see
past_vram.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from storm_bench.demo.past_vram import add_past_vram_arguments, run_past
from storm_bench.demo.report import Comparison, Report
from storm_bench.demo.run import Plan, run_demo
from storm_bench.demo.trainers import OnStep
from storm_bench.devices import device_here
from storm_bench.interrupts import noted_interrupts
from stormd.commands.arguments import positive_int
from stormd.errors import ConfigError
from stormd.machine import describe
from stormd.output import EXIT_FAILED, EXIT_OK, write_json
from stormd.sizes import format_size, parse_size

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where and how much to train."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    parser.add_argument("--steps", type=positive_int, default=4, help="steps a trainer takes")
    parser.add_argument(
        "--pool-bytes", metavar="SIZE", help="the daemon's pool (default: what the models need)"
    )
    parser.add_argument("--small", action="store_true", help="a model for seconds, not minutes")
    add_past_vram_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print its results. SIGTERM also ends the processes that it has started.

    Raises:
        ConfigError: --limit has no --past-vram beside it.
    """
    with noted_interrupts():
        if args.past_vram:
            return run_past(args)
        if args.limit is not None:
            raise ConfigError(f"--limit {args.limit} limits the GPU of --past-vram: add that")
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    with _progress() as bars:
        report = run_demo(plan, lambda name: _phase(bars, plan, name))
    if args.json:
        write_json({**report.to_json(), "machine": describe()})
    else:
        _print_report(report)
    return EXIT_OK if report.passed else EXIT_FAILED


def _plan(args: argparse.Namespace) -> Plan:
    device, dtype = _device_and_dtype(args.device)
    plan = Plan(device=device, dtype=dtype, steps=args.steps)
    if device == "cuda":
        plan = dataclasses.replace(plan, rows=64, pool_bytes=8 << 30)
    if args.small:
        plan = dataclasses.replace(plan, layers=2, width=128, heads=4, rows=8, length=128)
    if args.pool_bytes is not None:
        plan = dataclasses.replace(plan, pool_bytes=parse_size(args.pool_bytes))
    return plan


def _device_and_dtype(wanted: str) -> tuple[str, str]:
    """Return the device, and the dtype: bfloat16 if it is not slower there, else float32."""
    import torch

    device = device_here(wanted)
    capability = torch.backends.cpu.get_cpu_capability()
    fast = device == "cuda" or capability.startswith(("AVX512", "AMX"))
    return device, "bfloat16" if fast else "float32"


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Show bars on standard error, if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[loss]}")
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        yield bars


def _phase(bars: Progress, plan: Plan, name: str) -> OnStep:
    tasks = [
        bars.add_task(f"trainer {index} {name}", total=plan.steps, loss="starting")
        for index in range(plan.trainers)
    ]

    def on_step(index: int, done: int, loss: float) -> None:
        bars.update(tasks[index], completed=done, loss=f"loss {loss:.4f}")

    return on_step


_ROWS: Final[list[tuple[str, Callable[[Comparison], str]]]] = [
    ("last loss without offload", lambda c: f"{c.loss_plain:.6f}"),
    ("last loss with offload", lambda c: f"{c.loss_offload:.6f}"),
    ("steps with equal loss", lambda c: f"{c.equal_losses} of {c.steps}"),
    ("steps with all gradients equal", lambda c: f"{c.equal_gradients} of {c.steps}"),
    ("saved by autograd, a step", lambda c: format_size(c.saved_bytes)),
    ("  duplicates", lambda c: format_size(c.deduplicated_bytes)),
    ("  offloaded", lambda c: format_size(c.offloaded_bytes)),
    ("  recomputed", lambda c: format_size(c.recomputed_bytes)),
    ("  kept on the device", lambda c: format_size(c.kept_bytes)),
    ("stored in the pool, a step", lambda c: format_size(c.stored_bytes)),
    ("ratio, lossless", lambda c: f"{c.ratio:.2f}"),
    ("step time without offload", lambda c: f"{c.step_seconds_plain:.2f} s"),
    ("step time with offload", lambda c: f"{c.step_seconds_offload:.2f} s"),
]

_PEAK_ROWS: Final[list[tuple[str, Callable[[Comparison], str]]]] = [
    ("peak memory without offload", lambda c: format_size(c.peak_bytes_plain)),
    ("peak memory with offload", lambda c: format_size(c.peak_bytes_offload)),
    ("  less, as a share of offloaded bytes", lambda c: f"{c.peak_drop:.0%}"),
]


def _print_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = [f"trainer {index}" for index in range(len(report.trainers))]
    table = Table("", title=f"{report.device}, {report.dtype}", box=None)
    for name in columns:
        table.add_column(name, justify="right")
    memory_fell = all(trainer.has_fallen for trainer in report.trainers)
    for title, show in (*_ROWS, *(_PEAK_ROWS if memory_fell else ())):
        table.add_row(title, *(show(trainer) for trainer in report.trainers))
    console = Console()
    console.print(table)
    peak, capacity = map(format_size, (report.pool_peak_bytes, report.pool_capacity_bytes))
    console.print(
        f"pool: peak {peak} of {capacity}, not freed: {format_size(report.pool_left_bytes)}"
    )
    if not memory_fell:
        console.print(
            "peak memory did not fall: steps this small offload less than the client itself takes"
        )
    verdict = "identical to training without offload" if report.passed else "NOT identical"
    console.print(f"[bold {'green' if report.passed else 'red'}]{verdict}")
