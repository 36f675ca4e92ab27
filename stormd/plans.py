"""Static plans of a session, and their runs: what may be stored, and what room is promised for it.

What a run may store is known before it begins. So room is promised for its first parts in one step,
at their worst case, and each of these can be stored whatever others do meanwhile. A part leaves the
run when it is handed over: its promise is an entry's from then on. Every byte of a run's promise is
an entry's, or is given back when the run or its session ends.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

from storm_kernels.ancf import DType

from stormd.arena import granules
from stormd.lanes import blob_bound, parse_dtype
from stormd.protocol import Message, RegisterPlan, RestoredParts, StoredParts
from stormd.protocol.limits import MAX_BATCH

__all__ = ["MAX_PLANS", "MAX_PLAN_PARTS_HELD", "MAX_RUNS", "News", "Part", "Place", "Plan", "Run"]

MAX_PLANS: Final = 256
"""Plans of one session."""

MAX_PLAN_PARTS_HELD: Final = 16384
"""Parts of all plans of one session: some 3 MiB of the daemon's memory."""

MAX_RUNS: Final = 64
"""Runs of one session that have not ended."""


class Part(NamedTuple):
    """Bytes to be stored, their type, and what room the largest blob of them takes."""

    nbytes: int
    dtype: DType
    bound: int
    charge: int

    @classmethod
    def of(cls, nbytes: int, dtype: str) -> Part:
        """Return so many bytes of elements of the type of that name.

        Raises:
            ValueError: no such type, or no whole number of its elements.
        """
        kind, bound = parse_dtype(dtype, nbytes), blob_bound(nbytes)
        return cls(nbytes, kind, bound, granules(bound))


class Place(NamedTuple):
    """Where a part of a run lies: the five numbers of StoreParts."""

    part: int
    segment: int
    offset: int
    sequence: int
    ready: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts that a run of it may store; `totals[i]` is what the first i of them may take."""

    parts: tuple[Part, ...]
    codec: str
    totals: tuple[int, ...]

    @classmethod
    def of(cls, message: RegisterPlan) -> Plan:
        """Return what a message describes.

        Raises:
            ValueError: a type is none, or a size is no whole number of its elements.
        """
        known: dict[tuple[int, int], Part] = {}
        for nbytes, kind in set(zip(message.sizes, message.kinds, strict=True)):
            known[nbytes, kind] = Part.of(nbytes, message.dtypes[kind])
        parts = tuple(known[one] for one in zip(message.sizes, message.kinds, strict=True))
        totals = accumulate((part.charge for part in parts), initial=0)
        return cls(parts, message.codec, tuple(totals))

    def fitting(self, room: int) -> int:
        """Return how many of the first parts take at most `room` bytes."""
        return max(0, bisect_right(self.totals, room) - 1)


@dataclass(slots=True)
class Run:
    """One run of a plan, whose part i is entry `first` + i.

    Of the first `count` parts, which were promised, those not handed over hold `reserved` bytes.
    """

    first: int
    plan: Plan
    count: int
    reserved: int = 0
    waiting: int = 0
    """Parts that were promised and not handed over."""
    handed: bytearray = field(init=False)

    def __post_init__(self) -> None:
        """Begin with nothing handed over."""
        self.handed = bytearray(len(self.plan.parts))
        self.reserved = self.plan.totals[self.count]
        self.waiting = self.count

    def take(self, index: int) -> bool:
        """Note that a part is handed over, once; tell whether it was promised."""
        self.handed[index] = 1
        if index >= self.count:
            return False
        self.reserved -= self.plan.parts[index].charge
        self.waiting -= 1
        return True

    def assert_invariants(self) -> None:
        """Raise AssertionError where the run contradicts itself: for tests."""
        left = [i for i in range(self.count) if not self.handed[i]]
        assert self.waiting == len(left)
        assert self.reserved == sum(self.plan.parts[i].charge for i in left)
        assert 0 <= self.count <= len(self.plan.parts)


@dataclass(slots=True)
class News:
    """What has become of parts of one session, to be said together."""

    tickets: list[int] = field(default_factory=list)
    """Restores whose bytes are there."""
    _stored: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """By the mode: entries, and what each takes."""

    def stored(self, entry: int, nbytes: int, mode: str) -> None:
        """Say that an entry is in the arena."""
        entries, sizes = self._stored.setdefault(mode, ([], []))
        entries.append(entry)
        sizes.append(nbytes)

    def messages(self) -> list[Message]:
        """Return what is to be said."""
        made: list[Message] = []
        for mode, (entries, sizes) in self._stored.items():
            for begin in range(0, len(entries), MAX_BATCH):
                end = begin + MAX_BATCH
                made.append(StoredParts(entries[begin:end], sizes[begin:end], mode))
        made += [
            RestoredParts(self.tickets[begin : begin + MAX_BATCH])
            for begin in range(0, len(self.tickets), MAX_BATCH)
        ]
        return made
