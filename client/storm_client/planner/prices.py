"""The cost of each value of a step on a machine: to compute, to recompute and to store it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from storm_client.planner.machine import Machine
from storm_client.planner.problem import Problem, Value

if TYPE_CHECKING:
    from storm_client.eager.events import RecordedValue

__all__ = ["MadeValue", "Priced", "likeness", "operation_seconds"]


MadeValue: TypeAlias = "Value | RecordedValue"
"""A value of a step, as the planner or a recording knows it."""


def operation_seconds(values: Sequence[Value], machine: Machine) -> list[float]:
    """Return the seconds of each value's operation: the least measured for any equal operation.

    Operations of identical blocks are equal, and a wait for the link delays some of them. The time
    of an expensive operation that was not measured is unknown.
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
    """Return a key: operations with equal keys take equally long. `values` are all of the step."""
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
    """Seconds of the forward pass during which transfers on the link cost nothing."""

    @cached_property
    def values(self) -> Sequence[Value]:
        """All values that the step makes and saves."""
        return self.problem.values

    @cached_property
    def saved(self) -> list[int]:
        """Numbers of the values that autograd saves."""
        return [value.number for value in self.problem.saved]

    @cached_property
    def nbytes(self) -> list[int]:
        """Size of each value."""
        return [value.nbytes for value in self.values]

    @cached_property
    def recompute_seconds(self) -> list[float]:
        """Time to recompute each value once its inputs are present."""
        return [max(seconds, self.machine.thread_recompute) for seconds in self.seconds]

    @cached_property
    def is_recomputable(self) -> list[bool]:
        """For each value, whether it may be recomputed."""
        problem, ends = self.problem, self.problem.block_ends
        return [
            problem.may_recompute(value) and not math.isinf(seconds) and value.number not in ends
            for value, seconds in zip(self.values, self.seconds, strict=True)
        ]

    @cached_property
    def sources(self) -> list[tuple[int, ...]]:
        """The inputs of each value, without duplicates."""
        return [tuple(set(value.inputs)) for value in self.values]

    def store_seconds(self, rate: float) -> list[float]:
        """Return the seconds for storing each value at `rate` seconds a byte."""
        return [nbytes * rate + self.machine.thread_store for nbytes in self.nbytes]

    def link_seconds(self, numbers: Iterable[int]) -> float:
        """Return the link time for values, one way."""
        return sum(self.nbytes[n] for n in numbers) * self.machine.link
