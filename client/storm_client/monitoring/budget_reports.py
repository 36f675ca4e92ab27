"""Reports to `stormd advise` what a script's steps would take with each budget.

The steps run as they would without it. After some of them, the planner solves the measured step for
several budgets. One datagram sends the answers to the command, which then ends the script. Without
the variable STORMD_ADVISE, a script does none of this.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from storm_client.planner.plan import Plan
from stormd.protocol import Budget
from stormd.protocol.variables import ADVISE_VARIABLE

__all__ = ["BUDGETS", "Advising", "answers"]

BUDGETS: Final[tuple[Budget, ...]] = ("least", 0.25, 0.5, 0.75, 1.0)
"""Budgets that the planner is asked about, from the least memory to all saved tensors."""

FIRST_STEP: Final = 4
"""The first step that is timed: earlier ones learn the plan and try it."""

TIMED_STEPS: Final = 4

SEND_SECONDS: Final = 1.0
"""Longest wait for a command that does not read."""


class Advising:
    """Counts the steps of one Offload up to the one that reports. Threads may share it."""

    def __init__(self, path: str) -> None:
        """Report to the command that listens at the socket `path`."""
        self._path = path
        self._begun = 0
        self._first = 0.0

    @classmethod
    def from_environment(cls) -> Advising | None:
        """Return an instance if the environment asks for advice, else None."""
        path = os.environ.get(ADVISE_VARIABLE)
        return cls(path) if path else None

    def step_begins(
        self,
        seconds: float,
        plans: Callable[[Iterable[Budget]], list[Plan]],
        ratio: Callable[[], float],
        devices: Callable[[], Sequence[torch.device]],
    ) -> None:
        """Note that a step begins at this time; report the answers if enough steps have ended.

        `plans` solves the latest step for several budgets, `ratio` returns the compression ratio of
        its tensors, and `devices` their GPUs.
        """
        self._begun += 1
        if self._begun == FIRST_STEP:
            self._first = seconds
        if self._begun != FIRST_STEP + TIMED_STEPS:
            return
        lasted = (seconds - self._first) / TIMED_STEPS
        found = plans(BUDGETS)
        self._send(answers(found, ratio(), lasted, devices()))

    def _send(self, message: dict[str, Any]) -> None:
        # If the command has ended, or does not read, training goes on without an answer.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
            there.settimeout(SEND_SECONDS)
            there.connect(self._path)
            there.send(json.dumps(message).encode())


def answers(
    plans: Sequence[Plan], ratio: float, step_seconds: float, devices: Sequence[torch.device]
) -> dict[str, Any]:
    """Return the measurements, and each plan's figures; bytes and seconds are of one step.

    A wait is the link time beyond the forward pass. Without a GPU nothing hides the link, and the
    wait is the link time of both directions. The planner timed the forward pass in earlier steps.
    If those were slower than the steps timed here, that time could exceed a whole step, so it is
    capped.
    """
    on_gpu = bool(devices)
    forward = min(plans[0].forward_seconds, step_seconds) if plans else 0.0
    return {
        "pid": os.getpid(),
        "device": str(devices[0]) if on_gpu else "cpu",
        "step_seconds": step_seconds,
        "forward_seconds": forward,
        "saved_bytes": sum(plans[0].bytes_by_decision.values()) if plans else 0,
        "ratio": ratio,
        "peak_bytes": max(map(torch.cuda.max_memory_allocated, devices), default=None),
        "link_bytes_per_second": _link_rate(plans),
        "budgets": [
            _answer(budget, plan, ratio, forward if on_gpu else None)
            for budget, plan in zip(BUDGETS, plans, strict=False)
        ],
    }


def _answer(budget: Budget, plan: Plan, ratio: float, hidden: float | None) -> dict[str, Any]:
    """Return a plan's figures; `hidden` is the link time that costs nothing, None for none."""
    sizes = plan.bytes_by_decision
    link = plan.link_seconds
    return {
        "budget": budget,
        **{f"{name}_bytes": sizes[name] for name in ("keep", "offload", "replay")},
        "pool_bytes": int(sizes["offload"] / ratio),
        "link_seconds": link,
        "wait_seconds": 2 * link if hidden is None else max(0.0, link - hidden),
        "replay_seconds": plan.replay_seconds,
    }


def _link_rate(plans: Sequence[Plan]) -> float | None:
    """Return the tensor bytes per second on the link, one way; None if no plan uses the link."""
    for plan in plans:
        if plan.link_seconds:
            return plan.bytes_by_decision["offload"] / plan.link_seconds
    return None
