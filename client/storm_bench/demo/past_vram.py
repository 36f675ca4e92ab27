"""`stormd demo --past-vram`: trains under a memory limit that training without offload exceeds.

Both runs are real processes with the same model, batches and limit. The limit includes the memory
that offloading itself takes in the trainer. The exit status is 0 only if the run without offload
ran out of memory and the other took every step. On a machine without a GPU, an error says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from storm_bench.child_daemon import ChildDaemon, tail
from storm_bench.rows import run_child
from stormd.errors import ChildFailed, ConfigError, LaneUnavailable
from stormd.machine import describe
from stormd.output import EXIT_FAILED, EXIT_OK, write_json, write_line
from stormd.sizes import format_size, parse_size

__all__ = [
    "PastPlan",
    "PastReport",
    "PastRun",
    "add_past_vram_arguments",
    "run_past",
    "run_past_vram",
]

_MODULE: Final = "storm_bench.demo.past_vram_trainer"
_START_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class PastPlan:
    """What to train, and the GPU memory that it may take.

    The defaults have ~9 GiB of activations per step, beside 0.8 GiB of weights and as much of
    gradients. The client may take `staging_bytes` of the limit, which PyTorch does not count.
    """

    steps: int = 5
    limit_bytes: int = 6 << 30
    layers: int = 8
    width: int = 2048
    rows: int = 4
    length: int = 4096
    pool_bytes: int = 12 << 30
    staging_bytes: int = 512 << 20
    timeout: float = 300.0

    def daemon_flags(self) -> list[str]:
        """Return the daemon's command line."""
        return [
            f"--pool-bytes={self.pool_bytes}",
            f"--staging-bytes-cuda={self.staging_bytes}",
            "--device=cuda",
            "--cache-bytes=0",
        ]

    def arguments(self, address: str | None) -> list[str]:
        """Return the trainer's command line; address None trains without offload."""
        limit = self.limit_bytes if address is None else self.limit_bytes - self.staging_bytes
        names = ("steps", "layers", "width", "rows", "length")
        line = [f"--{name}={getattr(self, name)}" for name in names] + [f"--limit-bytes={limit}"]
        return line if address is None else [*line, f"--address={address}"]


@dataclass(slots=True)
class PastRun:
    """The report of one trainer. `error` is its out-of-memory message, empty if it has none."""

    parameters: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    offloaded_bytes: int = 0
    ratio: float = 0.0
    error: str = ""

    def take(self, report: dict[str, Any]) -> None:
        """Record one line of the trainer's output."""
        match report.pop("event"):
            case "model":
                self.parameters = report["parameters"]
            case "step":
                self.losses.append(report["loss"])
                self.seconds.append(report["seconds"])
            case "out_of_memory":
                self.error = report["error"]
            case "end":
                self.peak_bytes = report["peak_bytes"]
                self.offloaded_bytes = report["offloaded_bytes"]
                self.ratio = report["ratio"]


@dataclass(frozen=True, slots=True)
class PastReport:
    """Both runs, compared with the plan."""

    plan: PastPlan
    plain: PastRun
    offload: PastRun

    @property
    def peak_bytes(self) -> int:
        """The most GPU memory of the offloading trainer: PyTorch's, and the client's, if any."""
        return self.offload.peak_bytes + self.plan.staging_bytes

    @property
    def passed(self) -> bool:
        """Whether one run ran out of memory, and the other took all its steps within the limit."""
        trained = len(self.offload.losses) == self.plan.steps and not self.offload.error
        return bool(self.plain.error) and trained and self.peak_bytes <= self.plan.limit_bytes

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "passed": self.passed,
            "plan": asdict(self.plan),
            "without_offload": asdict(self.plain),
            "with_offload": asdict(self.offload) | {"peak_bytes": self.peak_bytes},
        }


def run_past_vram(plan: PastPlan) -> PastReport:
    """Run both trainers, one after the other.

    Raises:
        ChildFailed: the daemon or a trainer failed for a reason other than memory.
    """
    plain = _train(plan, None)
    with ChildDaemon(flags=plan.daemon_flags(), start_seconds=_START_SECONDS) as daemon:
        return PastReport(plan, plain, _train(plan, daemon.address))


def _train(plan: PastPlan, address: str | None) -> PastRun:
    command = [sys.executable, "-m", _MODULE, *plan.arguments(address)]
    ended = run_child(command, plan.timeout)
    if ended.status is None:
        raise ChildFailed(f"the trainer took longer than {plan.timeout:g} s")
    if ended.status != 0:
        raise ChildFailed(f"the trainer ended with {ended.status}: {tail(ended.complaints)}")
    run = PastRun()
    for line in ended.output.splitlines():
        run.take(json.loads(line))
    return run


# --- the command --------------------------------------------------------------------------------


def add_past_vram_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses this demo, and the limit."""
    parser.add_argument(
        "--past-vram",
        action="store_true",
        help="instead: train what runs out of GPU memory without offload",
    )
    limit = format_size(PastPlan().limit_bytes)
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help=f"with --past-vram: GPU memory to stay in (default: {limit})",
    )


def run_past(args: argparse.Namespace) -> int:
    """Run both trainers and print their results.

    Raises:
        LaneUnavailable: there is no GPU here.
        ConfigError: the limit leaves nothing beside the client's own memory.
    """
    plan = _plan(args)
    import torch

    if args.device == "cpu" or not torch.cuda.is_available():
        raise LaneUnavailable(
            "--past-vram needs an NVIDIA GPU: it limits a GPU's memory, and PyTorch finds none "
            "here; `stormd demo` shows the same training with and without offload on the host"
        )
    report = run_past_vram(plan)
    if args.json:
        write_json({**report.to_json(), "machine": describe()})
    else:
        _print(report)
    return EXIT_OK if report.passed else EXIT_FAILED


def _plan(args: argparse.Namespace) -> PastPlan:
    plan = PastPlan(steps=args.steps)
    if args.pool_bytes is not None:
        plan = replace(plan, pool_bytes=parse_size(args.pool_bytes))
    if args.limit is not None:
        plan = replace(plan, limit_bytes=parse_size(args.limit))
    if plan.limit_bytes <= plan.staging_bytes:
        raise ConfigError(
            f"--limit {format_size(plan.limit_bytes)} is no more than the "
            f"{format_size(plan.staging_bytes)} that the client may take itself: give it more"
        )
    return plan


def _print(report: PastReport) -> None:
    plan, plain, offload = report.plan, report.plain, report.offload
    tokens = f"{plan.rows} x {plan.length} tokens a step"
    write_line(
        f"GPT with {offload.parameters / 1e6:.0f} million parameters, bfloat16, {tokens}, "
        f"within {format_size(plan.limit_bytes)} of GPU memory"
    )
    write_line()
    write_line("without offload:")
    write_line(f"  {_ending(plain.error, len(plain.losses))}")
    write_line("with offload:")
    for number, (loss, seconds) in enumerate(zip(offload.losses, offload.seconds, strict=True), 1):
        write_line(f"  step {number}: loss {loss:.4f}, {seconds:.2f} s")
    if offload.error:
        write_line(f"  {_ending(offload.error, len(offload.losses))}")
    elif offload.losses:
        away = format_size(offload.offloaded_bytes // len(offload.losses))
        write_line(
            f"  peak at most {format_size(report.peak_bytes)}, with "
            f"{format_size(plan.staging_bytes)} that the client itself may take; {away} offloaded "
            f"a step, ratio {offload.ratio:.2f}"
        )
    write_line()
    write_line("trained past the limit" if report.passed else "NOT shown")


def _ending(error: str, steps: int) -> str:
    """Return as text how a run ended after `steps` steps."""
    return f"OutOfMemoryError in step {steps + 1}: {error}" if error else f"{steps} steps, no error"
