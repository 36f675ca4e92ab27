"""What tests of layers that are called again share."""

from __future__ import annotations

import math

import pytest
from storm_client.plan import kinds, layer_replay, planning
from storm_client.plan.kinds import HostBound, Kind
from torch import nn

__all__ = [
    "GradientCheckpointingLayer",
    "have_steps_bound_by_the_thread",
    "look_bound_by_the_thread",
]


class GradientCheckpointingLayer(nn.Module):
    """What declares by its name that it may be run again."""


def look_bound_by_the_thread(kind: Kind, forward_seconds: float | None) -> None:
    """Take a kind of step for bound by the thread that trains, once it has a plan."""
    if kind.host is None and kind.decisions is not None and forward_seconds:
        kind.host = HostBound(1e-4)


def have_steps_bound_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each kind of step be taken for such, however little of a GPU's memory it saves.

    And have that decide, not what steps take.
    """
    monkeypatch.setattr(planning, "_look_for_host", look_bound_by_the_thread)
    monkeypatch.setattr(kinds, "SETTLED", 0)
    monkeypatch.setattr(layer_replay, "SLOWER", math.inf)
    monkeypatch.setattr(planning, "LITTLE", 0.0)
