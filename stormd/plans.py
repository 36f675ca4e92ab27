"""Static plans of a session, and their runs: what may be stored, and what room there is for it.

What a run may store is known before it begins. So room is promised for its first parts in one step,
at their worst case, and each of these can be stored whatever others do meanwhile. A part leaves the
run when it is handed over: its promise is an entry's from then on. Every byte of a run's promise is
an entry's, or is given back when the run or its session ends.

Where a part's blob lay in one run, that of the next run lies: the block of an entry that is given
up stays with the plan. It is a run's while that goes on, and goes back to the pool when somebody
else has no room, or when the plan is forgotten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from stormd.arena import granules
from stormd.parts import Part
from stormd.protocol import (
    RESTORED_FIELDS,
    STORED_FIELDS,
    Message,
    RegisterPlan,
    RestoredParts,
    StoredParts,
    pack,
)
from stormd.protocol.limits import MAX_BATCH

if TYPE_CHECKING:
    from stormd.sessions import Entry

__all__ = ["MAX_PLANS", "MAX_PLAN_PARTS_HELD", "MAX_RUNS", "News", "Plan", "Run", "Spares"]

MAX_PLANS: Final = 256
"""Plans of one session."""

MAX_PLAN_PARTS_HELD: Final = 16384
"""Parts of all plans of one session: some 6 MiB of the daemon's memory, with an entry each."""

MAX_RUNS: Final = 64
"""Runs of one session that have not ended."""

WASTED_PART: Final = 8
"""A block of which a larger part than this is not needed any more is not kept."""


class Spares:
    """Entries that were given up, by the places of their parts, each with its block of the pool.

    `needs[i]` is what must be promised for part i beside the block that is there for it.
    """

    __slots__ = ("entries", "nbytes", "needs")

    def __init__(self, parts: tuple[Part, ...]) -> None:
        """Begin with none."""
        self.entries: list[Entry | None] = [None] * len(parts)
        self.needs = [part.charge for part in parts]
        self.nbytes = 0
        """Of all the blocks."""

    def put(self, index: int, entry: Entry, room: int) -> None:
        """Keep an entry whose block has so much room, for a part that has none."""
        self.entries[index] = entry
        self.needs[index] -= room
        self.nbytes += room

    def take(self, index: int) -> Entry | None:
        """Return the entry that was kept for a part, if one was: it is no more."""
        entry = self.entries[index]
        if entry is not None:
            self.entries[index] = None
            self.nbytes -= entry.charge
            self.needs[index] += entry.charge
        return entry

    def assert_invariants(self, parts: tuple[Part, ...]) -> None:
        """Raise AssertionError where the sums are not those of the blocks: for tests."""
        blocks = [None if one is None else one.block for one in self.entries]
        rooms = [0 if block is None else block.room for block in blocks]
        assert self.nbytes == sum(rooms)
        assert self.needs == [part.charge - room for part, room in zip(parts, rooms, strict=True)]
        assert min(self.needs) >= 0, "a block has more room than the largest blob of its part"
        for index, entry in enumerate(self.entries):
            if entry is not None:
                assert entry.index == index
                assert entry.released
                assert not entry.in_use, "what a lane uses was kept"


@dataclass(slots=True, eq=False)
class Plan:
    """The parts that a run of it may store, and what is kept for the next one."""

    parts: tuple[Part, ...]
    is_registered: bool = True
    """Until it is forgotten, or its session ends: from then on nothing is kept."""
    spares: Spares = field(init=False)

    def __post_init__(self) -> None:
        """Keep nothing yet."""
        self.spares = Spares(self.parts)

    @classmethod
    def of(cls, message: RegisterPlan) -> Plan:
        """Return what a message describes.

        Raises:
            ValueError: a type is none, or a size is no whole number of its elements.
        """
        known: dict[tuple[int, int], Part] = {}
        for nbytes, kind in set(zip(message.sizes, message.kinds, strict=True)):
            known[nbytes, kind] = Part.of(nbytes, message.dtypes[kind], message.codec)
        return cls(tuple(known[one] for one in zip(message.sizes, message.kinds, strict=True)))

    def keeps(self, entry: Entry) -> bool:
        """Keep an entry that is given up, with its block, for the next run; False where not.

        Not where one is there already, nor what lies in pieces or takes much more than it needs.
        """
        block, index, spares = entry.block, entry.index, self.spares
        if not self.is_registered or spares.entries[index] is not None:
            return False
        assert block is not None
        room = block.room
        if block.offset is None or granules(block.nbytes) + room // WASTED_PART < room:
            return False
        spares.put(index, entry, room)
        return True

    def take_spares(self) -> Spares:
        """Return what is kept, which is the caller's from now on."""
        spares, self.spares = self.spares, Spares(self.parts)
        return spares


@dataclass(slots=True, eq=False)
class Run:
    """One run of a plan, whose part i is entry `first` + i.

    Of the first `count` parts, which were promised, those not handed over hold `reserved` bytes
    beside the blocks in `spares`.
    """

    first: int
    plan: Plan
    spares: Spares
    count: int = 0
    reserved: int = 0
    waiting: int = 0
    """Parts that were promised and not handed over."""
    handed: bytearray = field(init=False)

    def __post_init__(self) -> None:
        """Begin with nothing promised or handed over."""
        self.handed = bytearray(len(self.plan.parts))

    def fitting(self, room: int, most: int) -> tuple[int, int]:
        """Return how many of the first parts, up to `most`, take at most `room`; what they take."""
        totals = list(accumulate(self.spares.needs, initial=0))
        count = max(0, min(bisect_right(totals, room) - 1, most))
        return count, totals[count]

    def take(self, index: int) -> Entry | None:
        """Note that a part is handed over; return the entry that was kept for it, if one was."""
        self.handed[index] = 1
        if index < self.count:
            self.reserved -= self.spares.needs[index]
            self.waiting -= 1
        return self.spares.take(index)

    def promised(self, count: int, nbytes: int) -> None:
        """Note what was promised, before anything is handed over."""
        self.count = self.waiting = count
        self.reserved = nbytes

    def assert_invariants(self) -> None:
        """Raise AssertionError where the run contradicts itself: for tests."""
        left = [i for i in range(self.count) if not self.handed[i]]
        assert self.waiting == len(left)
        assert self.reserved == sum(self.spares.needs[i] for i in left)
        assert 0 <= self.count <= len(self.plan.parts)
        self.spares.assert_invariants(self.plan.parts)
        for index, entry in enumerate(self.spares.entries):
            assert entry is None or not self.handed[index] or index >= self.count


@dataclass(slots=True)
class News:
    """What has become of parts of one session, to be said together."""

    tickets: list[int] = field(default_factory=list)
    """Restores whose bytes are there."""
    stored: defaultdict[str, list[int]] = field(default_factory=partial(defaultdict, list))
    """Of entries that are in the arena, by the mode: entry and stored bytes of each."""

    def messages(self) -> list[Message]:
        """Return what is to be said."""
        made: list[Message] = []
        for mode, stored in self.stored.items():
            made += [StoredParts(places, mode) for places in _packed(stored, STORED_FIELDS)]
        return made + [RestoredParts(places) for places in _packed(self.tickets, RESTORED_FIELDS)]


def _packed(values: list[int], fields: int) -> list[bytes]:
    """Return numbers of some parts, so many for each, as messages have room for them."""
    most = MAX_BATCH * fields
    return [pack(values[begin : begin + most]) for begin in range(0, len(values), most)]
