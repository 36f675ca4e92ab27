"""Values to plan for, and plans that recompute whatever can be recomputed, however expensive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import storm_client as storm
import torch
from storm_client.eager import plan_maker, signature
from storm_client.eager.events import RecordedValue
from storm_client.planner.machine import CPU, Machine, TransferFigures
from storm_client.planner.problem import Problem, Value
from storm_client.planner.search import PREDICTED, PlanResult, PlanSearch
from storm_client.transport.daemon_loss import Supply

__all__ = [
    "FREE_REPLAYS",
    "SOME_REPLAYS",
    "Took",
    "latest_problem",
    "mind_the_device_alone",
    "offload_products",
    "replay_all",
    "value",
]

FREE_REPLAYS = replace(
    CPU,
    link=1.0,
    codec=1.0,
    thread_store=1.0,
    thread_recompute=1e-9,
    unmeasured=1e-9,
    unmeasured_expensive=1e-9,
)
"""Offloading takes for ever, and no operation takes any time."""

SOME_REPLAYS = replace(FREE_REPLAYS, thread_store=1e-9, unmeasured_expensive=1e9)
"""Products leave, and all else is recomputed."""


class Took:
    """A time that is known, as one between two events that the device has come past."""

    is_known = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds


def replay_all(monkeypatch: pytest.MonkeyPatch, machine: Machine = FREE_REPLAYS) -> None:
    """Have every plan that is made from now on recompute all that it can, or by a machine."""
    monkeypatch.setattr(plan_maker, "machine_of", lambda _: machine)
    for name in ("figures", "latest_figures"):
        monkeypatch.setattr(Supply, name, lambda *_: TransferFigures())
    mind_the_device_alone(monkeypatch)


def offload_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every plan offload all products, wherever they are made, and recompute all else."""
    planned = RecordedValue.planned
    untimed = lambda value: replace(planned(value), seconds=0.0)  # noqa: E731
    monkeypatch.setattr(plan_maker, "machine_of", lambda _: SOME_REPLAYS)
    mind_the_device_alone(monkeypatch)
    monkeypatch.setattr(RecordedValue, "planned", untimed)
    monkeypatch.setattr(plan_maker, "last_bytes", lambda _saved: 0)
    monkeypatch.setattr(signature, "repeated_ends", lambda _values: frozenset())


def mind_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no plans be compared."""
    predicted = {PREDICTED: PlanResult(0.0, 0)}
    settled = lambda *_, **__: PlanSearch(is_settled=True, results=dict(predicted))  # noqa: E731
    monkeypatch.setattr(plan_maker, "search_for", settled)


def latest_problem(offload: storm.Offload) -> Problem:
    """Return what the plan of the latest step is made from."""
    planning = offload._planning
    assert planning._signatures.latest is not None
    return planning.maker.problem(planning._signatures.latest)


def value(
    number: int,
    nbytes: int = 100,
    operation: str = "",
    *inputs: int,
    saved: bool = True,
    seconds: float = 0.0,
    expensive: bool = False,
) -> Value:
    """Return a value of a step, saved once, as the planner is given it."""
    return Value(
        number=number,
        nbytes=nbytes,
        dtype=torch.float32,
        shape=(nbytes,),
        operation=operation,
        inputs=inputs,
        uses=int(saved),
        seconds=seconds,
        is_expensive=expensive,
    )


def alike_blocks(count: int) -> tuple[list[Value], frozenset[int]]:
    """Return the values of blocks that are alike, and what each ends with.

    Each saves its norm, its product and its activation.
    """
    values, ends = [value(0, 40)], set()
    for _ in range(count):
        first, entering = len(values), values[-1].number
        values += [
            value(first, 40, "rms_norm", entering, seconds=1.0),
            value(first + 1, 110, "linear", first, seconds=24.0, expensive=True),
            value(first + 2, 110, "silu", first + 1, seconds=3.0),
            value(first + 3, 40, "linear", first + 2, saved=False, seconds=24.0, expensive=True),
        ]
        ends.add(first + 3)
    return values, frozenset(ends)
