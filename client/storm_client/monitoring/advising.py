"""What a script's steps would take with each budget, told to `stormd advise`.

The steps run as they would without it. After some of them, the planner solves the measured step for
several budgets, and one datagram takes the answers to the command, which ends the script. A script
that nobody asked for advice, by STORMD_ADVISE, does none of this.
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
"""What is asked of the planner, from the least memory to all that is saved."""

FIRST_STEP: Final = 4
"""The first that is timed: those before it learn the plan and try it."""

TIMED_STEPS: Final = 4


class Advising:
    """Counts the steps of one Offload up to the one that tells. Threads may share it."""

    def __init__(self, path: str) -> None:
        """Tell the command that listens at the socket `path`."""
        self._path = path
        self._begun = 0
        self._first = 0.0

    @classmethod
    def asked(cls) -> Advising | None:
        """Return one if the environment asks for advice."""
        path = os.environ.get(ADVISE_VARIABLE)
        return cls(path) if path else None

    def step_begins(
        self,
        seconds: float,
        plans: Callable[[Iterable[Budget]], list[Plan]],
        ratio: Callable[[], float],
        devices: Callable[[], Sequence[torch.device]],
    ) -> None:
        """Note that a step begins at this time; tell what was found if enough have ended.

        `plans` solves the latest step for several budgets, `ratio` tells how well its tensors are
        compressed, and `devices` on which GPUs they lie.
        """
        self._begun += 1
        if self._begun == FIRST_STEP:
            self._first = seconds
        if self._begun != FIRST_STEP + TIMED_STEPS:
            return
        lasted = (seconds - self._first) / TIMED_STEPS
        found = plans(BUDGETS)
        self._tell(answers(found, ratio(), lasted, devices()))

    def _tell(self, told: dict[str, Any]) -> None:
        # A command that has gone needs no answer: training goes on.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
            there.connect(self._path)
            there.send(json.dumps(told).encode())


def answers(
    plans: Sequence[Plan], ratio: float, step_seconds: float, devices: Sequence[torch.device]
) -> dict[str, Any]:
    """Return what was measured, and each plan's figures; bytes and seconds are of one step.

    A wait is what the link needs beyond the forward pass; where nothing hides it, all of it, both
    ways. The planner timed the forward pass in earlier steps. If those were slower than the ones
    timed here, it could be longer than a step, of which it is a part: no longer is told.
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
    """Return a plan's figures; the link has `hidden` seconds that cost nothing, None with none."""
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
    """Return how many bytes of tensors a second cross the link one way; None if none does."""
    for plan in plans:
        if plan.link_seconds:
            return plan.bytes_by_decision["offload"] / plan.link_seconds
    return None
