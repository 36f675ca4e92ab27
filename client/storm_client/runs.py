"""Runs of static plans: what a step stores is known to the daemon before it does.

A plan says the parts of some values, by their numbers. Once the daemon knows it, a run of it is
admitted in one message: what it promised may be let go of as soon as it was sent, and parts are
said by their places. What is not in the plan, or has other sizes, goes as any other part does, and
so does what leaves when its run has ended.

The session's lock protects all of this; `transfers` is who changes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stormd.protocol.limits import MAX_PLAN_PARTS

__all__ = ["KnownPlan", "OpenRun", "Place", "PlannedValue", "Run", "StaticPlan"]


class PlannedValue(NamedTuple):
    """A value that every run of a plan may store: its number, bytes, and element type by name."""

    number: int
    nbytes: int
    dtype: str


class StaticPlan:
    """A plan of one session. The daemon forgets it when nobody holds this any more."""

    __slots__ = (
        "__weakref__",
        "_left_out",
        "_places",
        "codec",
        "is_registered",
        "kinds",
        "number",
        "sizes",
    )

    def __init__(
        self, number: int, values: Sequence[PlannedValue], codec: str, part_bytes: int
    ) -> None:
        """Plan the first of these values, as many as a plan may have parts for."""
        self.number = number
        self.codec = codec
        self.is_registered = False
        """Whether the daemon has said that it may be run."""
        self.sizes: list[int] = []
        """Of its parts, in bytes."""
        self.kinds: list[str] = []
        """Of each part the type of its elements."""
        self._places: dict[int, tuple[int, int, str]] = {}
        self._left_out: frozenset[PlannedValue] = frozenset()
        for count, value in enumerate(values):
            sizes = [
                min(part_bytes, value.nbytes - begin)
                for begin in range(0, value.nbytes, part_bytes)
            ]
            if len(self.sizes) + len(sizes) > MAX_PLAN_PARTS:
                self._left_out = frozenset(values[count:])
                break
            self._places[value.number] = (len(self.sizes), value.nbytes, value.dtype)
            self.sizes += sizes
            self.kinds += [value.dtype] * len(sizes)

    def first(self, value: PlannedValue) -> int | None:
        """Return the place of a value's first part; None where it is not in the plan as it is."""
        place = self._places.get(value.number)
        return place[0] if place is not None and place[1:] == value[1:] else None

    def covers(self, values: Sequence[PlannedValue]) -> bool:
        """Tell whether all of these values are in it, but for what it has no room for."""
        return all(self.first(one) is not None or one in self._left_out for one in values)


class Run:
    """One run of a plan, whose part i is the entry `first` + i."""

    __slots__ = ("count", "first", "handed", "is_answered", "is_open", "plan")

    def __init__(self, first: int, plan: StaticPlan) -> None:
        """Begin a run, of which nothing is promised yet."""
        self.first = first
        self.plan = plan
        self.count = 0
        """How many of its first parts the daemon has promised room for."""
        self.handed: set[int] = set()
        """The places of the parts that were sent."""
        self.is_answered = False
        self.is_open = True
        """Whether it may store more."""


class Place(NamedTuple):
    """Where a value is in a run: the place of its first part."""

    run: Run
    first: int

    def of(self, begin: int, nbytes: int, part_bytes: int) -> int | None:
        """Return the place of the value's bytes from `begin` on; None where it has none now."""
        run, index = self.run, self.first + begin // part_bytes
        if not run.is_open or index in run.handed or begin % part_bytes:
            return None
        return index if run.plan.sizes[index] == nbytes else None


class OpenRun(weakref.ref[Any]):
    """Tells, when its owner dies, that a run is over, by being appended to a deque."""

    __slots__ = ("run",)

    def __new__(cls, owner: object, run: Run, tell: Callable[[Any], None]) -> OpenRun:  # noqa: ARG004 - weakref.ref takes it in __new__ too
        return super().__new__(cls, owner, tell)

    def __init__(self, owner: object, run: Run, tell: Callable[[Any], None]) -> None:
        """Watch `owner`, for whom `run` is open."""
        super().__init__(owner, tell)  # type: ignore[call-arg]  # typeshed omits it
        self.run = run


class KnownPlan(weakref.ref[StaticPlan]):
    """Tells of a plan's death, by being appended to a deque."""

    __slots__ = ("number",)

    def __new__(cls, plan: StaticPlan, tell: Callable[[Any], None]) -> KnownPlan:
        return super().__new__(cls, plan, tell)

    def __init__(self, plan: StaticPlan, tell: Callable[[Any], None]) -> None:
        """Watch `plan`, whose number outlives it."""
        super().__init__(plan, tell)  # type: ignore[call-arg]  # typeshed omits it
        self.number = plan.number
