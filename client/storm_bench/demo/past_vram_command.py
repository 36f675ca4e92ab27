"""`stormd demo --past-vram`: trains under a memory limit that training without offload exceeds.

The exit status is 0 only where memory ended without offload and every step was taken with it. A
machine without a GPU is told so, and nothing is pretended.
"""

from __future__ import annotations

import argparse
import dataclasses

from storm_bench.demo.past_vram import PastPlan, PastReport, run_past_vram
from stormd.errors import ConfigError, LaneUnavailable
from stormd.machine import describe
from stormd.output import EXIT_FAILED, EXIT_OK, write_json, write_line
from stormd.sizes import format_size, parse_size

__all__ = ["add_past_vram_arguments", "run_past"]


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
    """Run both trainers and print what became of them.

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
        plan = dataclasses.replace(plan, pool_bytes=parse_size(args.pool_bytes))
    if args.limit is not None:
        plan = dataclasses.replace(plan, limit_bytes=parse_size(args.limit))
    if plan.limit_bytes <= plan.staging_bytes:
        raise ConfigError(
            f"--limit {format_size(plan.limit_bytes)} is no more than the "
            f"{format_size(plan.staging_bytes)} that the client takes itself: give it more"
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
            f"  peak {format_size(report.peak_bytes)}, {format_size(plan.staging_bytes)} of it the "
            f"client's own; {away} offloaded a step, ratio {offload.ratio:.2f}"
        )
    write_line()
    write_line("trained past the limit" if report.passed else "NOT shown")


def _ending(error: str, steps: int) -> str:
    """Return how a run ended after so many steps."""
    return f"OutOfMemoryError in step {steps + 1}: {error}" if error else f"{steps} steps, no error"
