"""The steps of the demo: a daemon, trainers without offload, the same with it, the comparison.

The daemon runs the whole time, so both runs share the machine with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from storm_bench.child_daemon import ChildDaemon
from storm_bench.demo.report import Report, compare
from storm_bench.demo.trainers import OnStep, Trained, run_trainers

__all__ = ["Plan", "run_demo"]

OnPhase = Callable[[str], OnStep]
"""Called with the name of a phase; returns the function to call with each of its steps."""

_FIRST_SEED: Final = 1234


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train and where.

    The defaults have ~630 MiB of activations per step and trainer, beside 25 MiB of weights. `rows`
    times `length` are the tokens of a step. `timeout` is the most seconds of one phase.
    `staging_bytes_cuda` is the most device memory that a trainer's client may take on cuda.
    """

    device: str
    dtype: str
    trainers: int = 2
    steps: int = 4
    layers: int = 8
    width: int = 256
    heads: int = 8
    rows: int = 16
    length: int = 256
    pool_bytes: int = 2 << 30
    staging_bytes_cuda: int = 256 << 20
    timeout: float = 300.0

    def daemon_flags(self) -> list[str]:
        """Return the daemon's command line."""
        names = ("pool_bytes", "device", "staging_bytes_cuda")
        flags = [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in names]
        return [*flags, "--cache-bytes=0"]

    def arguments(self, index: int, address: str | None) -> list[str]:
        """Return the command line of trainer `index`; address None trains without offload."""
        numbers = {
            name: getattr(self, name)
            for name in ("steps", "layers", "width", "heads", "rows", "length")
        }
        numbers |= {"seed": _FIRST_SEED + index, "threads": self._threads()}
        line = [f"--{name}={value}" for name, value in numbers.items()]
        line += [f"--device={self.device}", f"--dtype={self.dtype}"]
        return line if address is None else [*line, f"--address={address}"]

    def _threads(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // self.trainers)


def run_demo(plan: Plan, on_phase: OnPhase) -> Report:
    """Run the whole demo and return its report.

    Raises:
        ChildFailed: the daemon or a trainer could not do its work.
    """
    with ChildDaemon(flags=plan.daemon_flags()) as daemon:
        plain = _train(plan, None, on_phase("without offload"))
        offload = _train(plan, daemon.address, on_phase("with offload"))
        pool: dict[str, Any] = daemon.status()["pool"]
    staging = plan.staging_bytes_cuda if plan.device == "cuda" else 0
    pairs = zip(plain, offload, strict=True)
    return Report(
        device=plan.device,
        dtype=plan.dtype,
        trainers=[
            compare(one, two, device=plan.device, staging_bytes=staging) for one, two in pairs
        ],
        pool_capacity_bytes=pool["capacity_bytes"],
        pool_peak_bytes=pool["peak_used_bytes"],
        pool_left_bytes=pool["used_bytes"],
    )


def _train(plan: Plan, address: str | None, on_step: OnStep) -> list[Trained]:
    commands = [plan.arguments(index, address) for index in range(plan.trainers)]
    return run_trainers(commands, on_step, plan.timeout)
