"""What a step does, as it is recorded: values that it makes and saves, and the events of these.

A value is one storage at one version. Sizes are no part of an event: batches are of many lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, TypeAlias

import torch

from storm_client.monitoring.layers import NOWHERE, Place
from storm_client.planner.problem import Value

__all__ = ["CAST", "SAVED", "Event", "RecordedValue", "saved_numbers", "values_of"]

_HOST: Final = torch.device("cpu")

Event: TypeAlias = tuple[Any, int, torch.dtype | None, tuple[int, ...]]
"""SAVED, CAST or the function that was run; the value's number and dtype; its inputs.

Of what is saved neither dtype nor inputs are told."""

SAVED, CAST = "saved", "cast"
"""Autograd saves a value; autocast has made a value that was saved."""


@dataclass(slots=True)
class RecordedValue:
    """A storage at one version: what an operation made, or what autograd saved of unknown origin.

    `nbytes` is that of the whole storage, `seconds` what making it took. Of a signature's value
    `nbytes` is the most of all steps, and `seconds` what making so many takes.
    """

    number: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device = _HOST
    is_result: bool = True
    """Whether an operation made it that autograd knows of: then its changes are counted."""
    made_by: str = ""
    """The name of its node in the graph; empty for what no operation made."""
    operation: str = ""
    """The function's name; empty where it is not known, or cannot be recomputed."""
    is_expensive: bool = False
    inputs: tuple[int, ...] = ()
    """Numbers of the large values among its arguments."""
    over: tuple[int, ...] = ()
    """Numbers of those that its operation has written over, first of what was in its memory: gone
    since, they can only be recomputed."""
    uses: int = 0
    """How often it was saved."""
    parameter_bytes: int = 0
    """Of parameters that get gradients and that no later operation reads."""
    gathered_bytes: int = 0
    """Of those that were gathered to be read, and freed by the end of the block."""
    place: Place = NOWHERE
    """Where in the model."""
    seconds: float = 0.0
    timing: Callable[[], float] | None = None
    """Tells `seconds` once the device has come that far."""

    @property
    def layer(self) -> str:
        """In which layer of the model, empty where that is not known."""
        return self.place.layer

    @property
    def path(self) -> str:
        """In which module, by its qualified name."""
        return self.place.path

    @property
    def is_saved(self) -> bool:
        """Whether autograd has saved it."""
        return self.uses > 0

    @property
    def is_timed(self) -> bool:
        """Whether it is known what making it took, or will be."""
        return self.timing is not None or self.seconds > 0.0

    def grow(self, nbytes: int) -> None:
        """Be of more bytes: making them takes longer by as much."""
        factor = nbytes / self.nbytes if self.nbytes else 1.0
        self.nbytes, self.seconds = nbytes, factor * self.seconds
        if self.timing is not None:
            timing = self.timing
            self.timing = lambda: factor * timing()

    def planned(self) -> Value:
        """Return what the planner is told of it; waits until the device has made it."""
        if self.timing is not None:
            self.seconds, self.timing = self.timing(), None
        return Value(
            self.number,
            self.nbytes,
            self.dtype,
            tuple(self.shape),
            operation=self.operation,
            is_expensive=self.is_expensive,
            inputs=self.inputs,
            seconds=self.seconds,
            uses=self.uses,
            is_given=not (self.operation or self.made_by),
            parameter_bytes=self.parameter_bytes,
            gathered_bytes=self.gathered_bytes,
        )


def saved_numbers(events: Iterable[Event]) -> list[int]:
    """Return the numbers of what autograd saves, in the order in which it first does."""
    return list(dict.fromkeys(number for what, number, *_ in events if what is SAVED))


def values_of(events: list[Event], known: list[RecordedValue]) -> list[RecordedValue]:
    """Return the values of some events, the first of a step whose values are known."""
    numbers = chain.from_iterable((number, *inputs) for _, number, _, inputs in events)
    count = max(numbers, default=-1) + 1
    values = [
        replace(value, operation="", is_expensive=False, inputs=(), over=(), uses=0)
        for value in known[:count]
    ]
    for what, number, *_ in events:
        value, like = values[number], known[number]
        if what is SAVED:
            value.uses += 1
        else:
            value.operation, value.is_expensive = like.operation, like.is_expensive
            value.inputs, value.over = like.inputs, like.over
    return values
