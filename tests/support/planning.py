"""Plans that make again whatever can be made again, however dear: what tests of exactness need."""

from __future__ import annotations

import pytest
from storm_client.plan import planning
from storm_client.plan.planner import Costs

__all__ = ["FREE_REPLAYS", "replay_all"]

FREE_REPLAYS = Costs(
    link=1.0, shipping=1.0, ship_floor=1.0, replay_floor=1e-9, default=1e-9, dear=1e-9
)
"""Shipping takes for ever, and no operation takes any time."""


def replay_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every plan that is made from now on replay all that it can."""
    monkeypatch.setattr(planning, "CPU_COSTS", FREE_REPLAYS)
    monkeypatch.setattr(planning, "CUDA_COSTS", FREE_REPLAYS)
