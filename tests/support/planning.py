"""Values to plan for, and plans that make again whatever can be made again, however dear."""

from __future__ import annotations

import pytest
import torch
from storm_client.eager import controller as planning
from storm_client.eager.signature import Value
from storm_client.planner.solver import Costs

__all__ = ["FREE_REPLAYS", "mind_the_device_alone", "replay_all", "value"]

FREE_REPLAYS = Costs(
    link=1.0, shipping=1.0, ship_floor=1.0, replay_floor=1e-9, default=1e-9, dear=1e-9
)
"""Shipping takes for ever, and no operation takes any time."""


def replay_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every plan that is made from now on replay all that it can."""
    monkeypatch.setattr(planning, "CPU_COSTS", FREE_REPLAYS)
    monkeypatch.setattr(planning, "CUDA_COSTS", FREE_REPLAYS)
    mind_the_device_alone(monkeypatch)


def mind_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no step be bound by its thread: on a GPU all steps of tests are."""
    monkeypatch.setattr(planning, "host_bound", lambda *_: None)


def value(
    number: int,
    nbytes: int = 100,
    operation: str = "",
    *inputs: int,
    saved: bool = True,
    seconds: float = 0.0,
    dear: bool = False,
) -> Value:
    """Return a value of a step, saved once, as the planner is given it."""
    return Value(
        number=number,
        nbytes=nbytes,
        dtype=torch.float32,
        shape=torch.Size((nbytes,)),
        operation=operation,
        inputs=inputs,
        uses=int(saved),
        seconds=seconds,
        is_dear=dear,
    )
