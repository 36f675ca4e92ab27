"""What the steps of an Offload did, one record for each kind of step.

Two steps are of one kind if they made and saved the same values in the same order: the same
functions on the same inputs, sizes and dtypes. A value is one storage at one version. While a step
goes on it is compared with a kind that is known; where they part, another kind that begins so far
alike is followed, or none, and what comes then is offloaded. At the end the step is a kind of its
own if it was like none.

Nothing here decides what is returned: that a value can be made again is shown by what the step at
hand has run, never by what another did.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from storm_client.plan.decisions import OFFLOAD, Decision

if TYPE_CHECKING:
    from storm_client.plan.table import Plan

__all__ = ["KNOWN_KINDS", "Event", "Kind", "Kinds", "StepRecord", "Value"]

KNOWN_KINDS = 8
"""Kinds of steps remembered (training, validation, several threads) before the oldest goes."""

OBSERVED = 2
"""Forward passes that are timed before the plan is made for the last time."""

MOST_EVENTS = 20_000
"""A step that goes on and on, as a block around a loop does, is not watched any further."""

Event: TypeAlias = tuple[object, ...]


@dataclass(slots=True)
class Value:
    """A storage at one version: what an operation made, or what autograd saved of unknown origin.

    `nbytes` is that of the whole storage, `seconds` what making it took.
    """

    number: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    is_on_gpu: bool = False
    is_result: bool = True
    """Whether an operation made it that autograd knows of: then its changes are counted."""
    operation: str = ""
    """The function's name; empty where it is not known, or cannot be run again."""
    is_dear: bool = False
    inputs: tuple[int, ...] = ()
    """Numbers of the large values among its arguments."""
    uses: int = 0
    """How often it was saved."""
    layer: str = ""
    """In which layer of the model, empty where that is not known."""
    seconds: float = 0.0
    timing: Callable[[], float] | None = None
    """Tells `seconds` once the device has come that far."""

    @property
    def is_saved(self) -> bool:
        """Whether autograd has saved it."""
        return self.uses > 0

    def timed(self) -> float:
        """Return how long it took to make, as far as that is known."""
        if self.timing is not None:
            self.seconds, self.timing = self.timing(), None
        return self.seconds


class Kind:
    """One kind of step: its values, what was decided for each, and what was seen of replays."""

    def __init__(self, events: tuple[Event, ...], values: list[Value]) -> None:
        """Describe a step that made and saved `values`."""
        self.events = events
        self.values = values
        self.decisions: list[Decision] | None = None
        """One a value; None until there is a plan."""
        self.plan: Plan | None = None
        """The same for people."""
        self.told: weakref.ref[Any] | None = None
        """The session whose daemon knows the present plan, which hooks tell it of."""
        self.verified: set[int] = set()
        """Values that were made again by the present plan and found to be the same."""
        self.rejected: dict[int, str] = {}
        """Values that were not, with the reason."""
        self.is_outdated = True
        """Whether something was learned that the plan does not know."""
        self.window: float | None = None
        """Seconds of the shortest forward pass that followed the plan; None until seen."""
        self._forwards: list[Callable[[], float]] = []

    @property
    def is_on_gpu(self) -> bool:
        """Whether its values lie in a GPU's memory."""
        return any(value.is_on_gpu for value in self.values)

    def follow(self, decisions: list[Decision]) -> None:
        """Follow these from now on. Where they are new, every replay has to prove itself anew.

        What a value is made from may be another now, and what is the same by one way may not be by
        another, where something writes to memory without being counted.
        """
        self.is_outdated = False
        if decisions != self.decisions:
            self.verified = set()
        self.decisions = decisions

    def observe(self, forward: Callable[[], float]) -> None:
        """Note a forward pass that followed the plan; two of them make the plan anew, once."""
        if self.window is not None or len(self._forwards) == OBSERVED:
            return
        self._forwards.append(forward)
        self.is_outdated |= len(self._forwards) == OBSERVED

    def measure(self) -> float | None:
        """Return the window, waiting until the device has come that far."""
        if self.window is None and len(self._forwards) == OBSERVED:
            self.window = min(forward() for forward in self._forwards)
            self._forwards.clear()
        return self.window

    def reject(self, number: int, reason: str) -> None:
        """Note that a value cannot be had again by its operation."""
        self.rejected.setdefault(number, reason)
        self.is_outdated = True


class StepRecord:
    """What one step has made and saved so far, and the known kind that it is like."""

    __slots__ = ("_kinds", "events", "kind", "values")

    def __init__(self, kinds: Kinds, kind: Kind | None) -> None:
        """Begin a step that is expected to be of `kind`."""
        self._kinds = kinds
        self.kind = kind
        self.events: list[Event] = []
        self.values: list[Value] = []

    @property
    def is_full(self) -> bool:
        """Whether the step is too long to be remembered."""
        return len(self.events) >= MOST_EVENTS

    def add(self, value: Value) -> Value:
        """Number a new value."""
        self.values.append(value)
        return value

    def happened(self, event: Event, number: int) -> Decision | None:
        """Note an event of the value `number`; return what is to become of it, if that is known."""
        position = len(self.events)
        self.events.append(event)
        kind = self.kind
        if kind is None:
            return None
        if position >= len(kind.events) or kind.events[position] != event:
            kind = self.kind = self._kinds.begins_with(self.events)
            if kind is None:
                return None
        decisions = kind.decisions
        return None if decisions is None else decisions[number]

    def decided(self, number: int) -> Decision:
        """Return what is to become of a value."""
        kind = self.kind
        if kind is None or kind.decisions is None or number >= len(kind.decisions):
            return OFFLOAD
        return kind.decisions[number]


class Kinds:
    """The kinds of steps that are known. Steps of several threads may share them."""

    def __init__(self) -> None:
        """Start without experience."""
        self._lock = threading.Lock()  # protects the table
        self._known: OrderedDict[tuple[Event, ...], Kind] = OrderedDict()

    @property
    def latest(self) -> Kind | None:
        """The kind of the last step that ended."""
        with self._lock:
            return next(reversed(self._known.values()), None)

    def outdated(self) -> list[Kind]:
        """Return the kinds that have to be planned."""
        with self._lock:
            return [kind for kind in self._known.values() if kind.is_outdated]

    def begins_with(self, events: list[Event]) -> Kind | None:
        """Return the kind used last whose steps begin with `events`."""
        count, begun = len(events), tuple(events)
        with self._lock:
            for kind in reversed(self._known.values()):
                if len(kind.events) >= count and kind.events[:count] == begun:
                    return kind
        return None

    def ended(self, step: StepRecord) -> Kind | None:
        """Return the kind of a step that has ended; None for one that made or saved nothing."""
        if not step.values or step.is_full:
            return None
        kind = step.kind
        key = kind.events if kind and len(kind.events) == len(step.events) else tuple(step.events)
        with self._lock:
            known = self._known.pop(key, None)
            if known is None:
                known = Kind(key, step.values)
                while len(self._known) >= KNOWN_KINDS:
                    self._known.popitem(last=False)
            self._known[key] = known
        return known
