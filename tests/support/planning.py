"""Plans that make again whatever can be made again, however dear: what tests of exactness need."""

from __future__ import annotations

import pytest
from storm_client.plan import planner, planning
from storm_client.plan.planner import Costs

__all__ = ["FREE_REPLAYS", "mind_the_device_alone", "replay_all", "slice_all"]

SLICE_ALIGNMENT = 16
"""Bytes of the largest element."""

FREE_REPLAYS = Costs(
    link=1.0, shipping=1.0, ship_floor=1.0, replay_floor=1e-9, default=1e-9, dear=1e-9
)
"""Shipping takes for ever, and no operation takes any time."""


def slice_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every plan that is made from now on let a third of each value stay that leaves."""

    def cut(state: planner._State) -> None:
        for number in state.stored:
            nbytes = state.problem.values[number].nbytes
            state.slices[number] = nbytes // 3 // SLICE_ALIGNMENT * SLICE_ALIGNMENT

    monkeypatch.setattr(planner._State, "let_a_slice_stay", cut)
    mind_the_device_alone(monkeypatch)


def replay_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every plan that is made from now on replay all that it can."""
    monkeypatch.setattr(planning, "CPU_COSTS", FREE_REPLAYS)
    monkeypatch.setattr(planning, "CUDA_COSTS", FREE_REPLAYS)
    mind_the_device_alone(monkeypatch)


def mind_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no step be bound by its thread: on a GPU all steps of tests are."""
    monkeypatch.setattr(planning, "host_bound", lambda *_: None)
