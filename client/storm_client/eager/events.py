"""The record of a step: the values that it makes and saves, and the events in their order.

A value is one storage at one version. Events have no sizes, since batches have many lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from storm_client.monitoring.layers import NOWHERE, Place
from storm_client.planner.problem import Value

if TYPE_CHECKING:
    from storm_client.eager.launches import Kernel

__all__ = [
    "CAST",
    "SAVED",
    "Event",
    "LoggedEvent",
    "RecordedValue",
    "saved_numbers",
    "values_of",
]

_HOST: Final = torch.device("cpu")

Event: TypeAlias = tuple[Any, int, torch.dtype | None, tuple[int, ...]]
"""SAVED, CAST or the function that was run; the value's number; its dtype; its inputs.

A SAVED event has neither dtype nor inputs."""

SAVED, CAST = "saved", "cast"
"""SAVED: autograd saves a value. CAST: autocast has made a value that was saved."""


@dataclass(slots=True)
class RecordedValue:
    """A storage at one version, made by an operation or saved by autograd with unknown origin.

    `nbytes` is the size of the whole storage, `seconds` the time that its operation took. In a
    signature `nbytes` is the largest size over all steps, and `seconds` the time for that size.
    """

    number: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device = _HOST
    is_result: bool = True
    """Whether an operation known to autograd made it: then its changes are counted."""
    is_copied: bool = False
    """Whether recipes that read it copy it: no operation known to autograd had made it when it was
    first seen. Its changes are not counted then."""
    made_by: str = ""
    """The name of its node in the graph; empty where no operation made it."""
    is_made_inside: bool = False
    """Whether a function of the step made it without a gradient, on its own device."""
    operation: str = ""
    """The function's name; empty where it is not known, or cannot be recomputed."""
    is_expensive: bool = False
    inputs: tuple[int, ...] = ()
    """Numbers of the large values among its arguments; -1 for small ones and parameters."""
    over: tuple[int, ...] = ()
    """Numbers of the values that its operation has overwritten, the one in its own memory first.
    They no longer exist and can only be recomputed."""
    uses: int = 0
    """The number of times it was saved."""
    parameter_bytes: int = 0
    """Bytes of the parameters it reads that get gradients and that no later operation reads."""
    gathered_bytes: int = 0
    """The same of parameters that were gathered to be read, and freed by the end of the block."""
    is_cached: bool = False
    """Whether autocast holds it until the forward pass ends."""
    place: Place = NOWHERE
    """Where in the model it was made or saved."""
    seconds: float = 0.0
    timing: Callable[[], float] | None = None
    """Returns `seconds`, waiting for the device."""

    @property
    def layer(self) -> str:
        """The layer of the model; empty where it is not known."""
        return self.place.layer

    @property
    def path(self) -> str:
        """The qualified name of the module."""
        return self.place.path

    @property
    def is_saved(self) -> bool:
        """Whether autograd has saved it."""
        return self.uses > 0

    @property
    def is_saved_gradless(self) -> bool:
        """Whether it is saved and was made without a gradient, by a function that is not known."""
        return self.is_saved and self.is_made_inside and not self.operation

    @property
    def is_timed(self) -> bool:
        """Whether the time of its operation is known, or will be."""
        return self.timing is not None or self.seconds > 0.0

    def grow(self, nbytes: int) -> None:
        """Grow to `nbytes`, and scale the time of its operation by the same factor."""
        factor = nbytes / self.nbytes if self.nbytes else 1.0
        self.nbytes, self.seconds = nbytes, factor * self.seconds
        if self.timing is not None:
            timing = self.timing
            self.timing = lambda: factor * timing()

    def planned(self) -> Value:
        """Return the value as the planner needs it; waits until its time is known."""
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
            is_made_inside=self.is_made_inside,
            parameter_bytes=self.parameter_bytes,
            gathered_bytes=self.gathered_bytes,
            is_cached=self.is_cached,
            device=self.device.index,
        )


class LoggedEvent(NamedTuple):
    """A saved tensor, or an output of a call; as native/call_log.cpp records it."""

    position: int
    """The event's position in the script; -1 for a call that is only counted."""
    name: str
    overload: str
    kernel: Kernel | None
    """The kernel of a launch, which has neither name nor overload."""
    place: int
    """The output's place among the call's outputs."""
    arguments: tuple[int, ...]
    """For each tensor of the call its place among the function's tensors; -1 for none of them."""
    inside: str
    """The name of the enclosing call that has copied its arguments by this call; else empty."""

    @property
    def called(self) -> str | Kernel | None:
        """The called operator's name or the kernel; None for a saved tensor."""
        return self.kernel or self.name or None

    @property
    def is_used_call(self) -> bool:
        """Whether it is a call whose output matters."""
        return self.called is not None and self.position >= 0


def saved_numbers(events: Iterable[Event]) -> list[int]:
    """Return the numbers of the values that autograd saves, in the order of their first save."""
    return list(dict.fromkeys(number for what, number, *_ in events if what is SAVED))


def values_of(events: list[Event], known: list[RecordedValue]) -> list[RecordedValue]:
    """Return the values of `events`, the first events of a step whose values are `known`."""
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
