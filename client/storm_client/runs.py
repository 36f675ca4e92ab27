"""Runs of static plans: what a step stores is known to the daemon before it does.

A plan says the parts of some values, by their numbers. Once the daemon knows it, a run of it is
admitted in one message: what it promised may be let go of as soon as it was sent, and parts are
said by their places. What is not in the plan, or has other sizes, goes as any other part does, and
so does what leaves when its run has ended.

The session's lock protects all of this; what the daemon is told of it goes to the outbox.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from stormd.protocol import EndRun, Envelope, ForgetPlan, RegisterPlan, RunPlan
from stormd.protocol.limits import MAX_PLAN_PARTS

__all__ = ["Place", "PlannedValue", "Run", "Runs", "StaticPlan"]


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

    def hand_out(self, index: int) -> tuple[int, bool]:
        """Note that part `index` is sent; return its entry, and whether room is promised for it."""
        self.handed.add(index)
        return self.first + index, index < self.count


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


class _OpenRun(weakref.ref[Any]):
    """Tells, when its owner dies, that a run is over, by being appended to a deque."""

    __slots__ = ("run",)
    run: Run


class _KnownPlan(weakref.ref[StaticPlan]):
    """Tells of a plan's death, by being appended to a deque."""

    __slots__ = ("number",)
    number: int


class Runs:
    """The static plans of one session, and their runs.

    A call that an interrupt ended may be made again.
    """

    def __init__(self, numbers: Iterator[int], outbox: list[Envelope], part_bytes: int) -> None:
        """Number plans and entries by `numbers`; values travel in parts of `part_bytes`."""
        self._numbers = numbers
        self._outbox = outbox
        self._part_bytes = part_bytes
        self._plans: dict[int, _KnownPlan] = {}
        """By their numbers: those that the daemon was told of, until it was told to forget them."""
        self._runs: dict[int, Run] = {}
        """By their first entries: those that are open, or that the daemon has yet to answer."""
        self._owned: dict[int, _OpenRun] = {}
        """By their first entries: those that are open, and for whom."""
        self._over: deque[_KnownPlan | _OpenRun] = deque()
        """Plans nobody holds any more, and runs whose owners died."""

    def register(self, values: Sequence[PlannedValue], codec: str) -> StaticPlan:
        """Tell the daemon what a step stores; the plan may be run once it has answered."""
        plan = StaticPlan(next(self._numbers), values, codec, self._part_bytes)
        dtypes = list(dict.fromkeys(plan.kinds))
        message = RegisterPlan(
            plan=plan.number,
            sizes=plan.sizes,
            kinds=[dtypes.index(kind) for kind in plan.kinds],
            dtypes=dtypes,
            codec=codec,
        )
        known = _KnownPlan(plan, self._over.append)
        known.number = plan.number
        self._plans[plan.number] = known
        self._outbox.append(Envelope(plan.number, message))
        return plan

    def begin(self, plan: StaticPlan, owner: object) -> Run | None:
        """Begin a run that ends with `owner` at the latest; None where the plan may not be run."""
        if not plan.is_registered:
            return None
        first = next(self._numbers)
        for _ in plan.sizes[1:]:
            next(self._numbers)
        run = Run(first, plan)
        owned = _OpenRun(owner, self._over.append)
        owned.run = run
        self._owned[first] = owned
        self._runs[first] = run
        self._outbox.append(Envelope(first, RunPlan(plan=plan.number, run=first)))
        return run

    def close(self, run: Run) -> None:
        """Store nothing more in a run; doing so again is fine."""
        if self._owned.pop(run.first, None) is None:
            return
        run.is_open = False
        self.forget_answered(run.first)
        self._outbox.append(Envelope(0, EndRun(run.first)))

    def forget_over(self) -> None:
        """Tell the daemon of the plans and runs that nobody holds any more."""
        while self._over:
            one = self._over[0]
            if isinstance(one, _OpenRun):
                self.close(one.run)
            elif self._plans.pop(one.number, None) is not None:
                self._outbox.append(Envelope(0, ForgetPlan(one.number)))
            self._over.popleft()

    def end(self) -> None:
        """Forget all: no answer will come any more."""
        self._runs.clear()
        self._owned.clear()
        self._plans.clear()

    # --- answers ----------------------------------------------------------------------------

    def registered(self, number: int) -> None:
        """Note that a plan may be run."""
        known = self._plans.get(number)
        plan = None if known is None else known()
        if plan is not None:
            plan.is_registered = True

    def admitted(self, first: int, count: int) -> list[int]:
        """Note that room for the first `count` parts of a run is promised.

        Returns the entries of those that were sent already. `forget_answered` comes behind it.
        """
        run = self._runs.get(first)
        if run is None:
            return []
        run.is_answered, run.count = True, min(count, len(run.plan.sizes))
        return [first + index for index in sorted(run.handed) if index < run.count]

    def refused(self, first: int) -> bool:
        """Send no more in a run that does not exist; False where there is none of that number."""
        run = self._runs.pop(first, None)
        if run is None:
            return False
        run.is_answered, run.is_open = True, False
        self._owned.pop(first, None)
        return True

    def forget_answered(self, first: int) -> None:
        """Forget a run that is over, and that the daemon has answered."""
        run = self._runs.get(first)
        if run is not None and run.is_answered and not run.is_open:
            del self._runs[first]

    def assert_invariants(self) -> None:
        """Check the tables against each other."""
        for first, run in self._runs.items():
            assert run.first == first
            assert run.is_open == (first in self._owned)
            assert run.is_open or not run.is_answered, "a run that is over was not forgotten"
            assert all(0 <= index < len(run.plan.sizes) for index in run.handed)
        assert self._owned.keys() <= self._runs.keys()
