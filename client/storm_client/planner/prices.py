"""What a step's values cost by the figures of a machine: to compute, to recompute and to store.

Everything here is pure: no tensor, device or clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from storm_client.planner.machine import Machine
from storm_client.planner.problem import Problem, Value

__all__ = ["MadeValue", "Priced", "likeness", "operation_seconds"]


class MadeValue(Protocol):
    """What an operation has made, as the planner or a recording knows it."""

    @property
    def operation(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def inputs(self) -> tuple[int, ...]: ...


def operation_seconds(values: Sequence[Value], machine: Machine) -> list[float]:
    """Return what each value's operation takes: the least that was measured of one like it.

    Operations of identical blocks are alike, and a wait for the link falls into some of them. What
    an expensive one takes that was not measured is not known.
    """
    least: dict[tuple[object, ...], float] = {}
    keys = [likeness(value, values) for value in values]
    for value, key in zip(values, keys, strict=True):
        if value.seconds:
            least[key] = min(least.get(key, value.seconds), value.seconds)
    return [
        least[key] if key in least else _default(value, machine)
        for value, key in zip(values, keys, strict=True)
    ]


def _default(value: Value, machine: Machine) -> float:
    if not value.operation:
        return 0.0
    rate = machine.unmeasured_expensive if value.is_expensive else machine.unmeasured
    return value.nbytes * rate


def likeness(value: MadeValue, values: Sequence[MadeValue]) -> tuple[object, ...]:
    """Return what operations have in common that take as long; `values` are all of the step."""
    inputs = (values[n].shape if n >= 0 else None for n in value.inputs)
    return (value.operation, value.shape, value.dtype, *inputs)


@dataclass(frozen=True)
class Priced:
    """A problem, and the machine that it is solved for."""

    problem: Problem
    machine: Machine
    seconds: Sequence[float]
    """Of each value's operation."""
    window: float
    """Seconds of the forward pass that the link can hide behind."""

    @cached_property
    def values(self) -> Sequence[Value]:
        """What the step makes and saves."""
        return self.problem.values

    @cached_property
    def saved(self) -> list[int]:
        """Numbers of what autograd saves."""
        return [value.number for value in self.problem.saved]

    @cached_property
    def nbytes(self) -> list[int]:
        """Of each value."""
        return [value.nbytes for value in self.values]

    @cached_property
    def recompute_seconds(self) -> list[float]:
        """What recomputing each value takes, its inputs at hand."""
        return [max(seconds, self.machine.thread_recompute) for seconds in self.seconds]

    @cached_property
    def is_recomputable(self) -> list[bool]:
        """Which values there may be a way to recompute."""
        problem, ends = self.problem, self.problem.block_ends
        return [
            problem.may_recompute(value) and not math.isinf(seconds) and value.number not in ends
            for value, seconds in zip(self.values, self.seconds, strict=True)
        ]

    @cached_property
    def sources(self) -> list[tuple[int, ...]]:
        """What each value is made from, each once."""
        return [tuple(set(value.inputs)) for value in self.values]

    def store_seconds(self, rate: float) -> list[float]:
        """Return what storing each value costs at `rate` seconds a byte."""
        return [nbytes * rate + self.machine.thread_store for nbytes in self.nbytes]

    def link_seconds(self, numbers: Iterable[int]) -> float:
        """Return what the link needs for values, one way."""
        return sum(self.nbytes[n] for n in numbers) * self.machine.link
