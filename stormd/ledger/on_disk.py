"""Where an entry is that was written to the tier on disk, and how such entries add up.

An entry's place is a block of the pool, an extent of the file, or both. These classes hold state
only; spills.py decides what happens when.

    in the pool --> WRITING --> CLEAN <--> AWAY
                                  ^         |
                                  +- READING+
    once the tier has ended:  WRITING, CLEAN --> in the pool alone;  AWAY, READING --> LOST
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from stormd.memory.arena import Block, Space, granules

__all__ = ["Disk", "DiskPhase", "OnDisk"]


class DiskPhase(Enum):
    """Where the blob is. In WRITING or READING, a thread of the tier uses both places."""

    WRITING = auto()
    """Complete in the pool, not yet on the disk."""

    CLEAN = auto()
    """Complete in both places: the block can be freed at once."""

    AWAY = auto()
    """On the disk alone."""

    READING = auto()
    """On the disk, and not yet complete in the block that is reserved for it."""

    LOST = auto()
    """It was on the disk alone when the tier ended."""

    __hash__ = object.__hash__  # an Enum's own is Python code, called at every look-up of a sum


_NEXT: Final = {
    DiskPhase.WRITING: (DiskPhase.CLEAN,),
    DiskPhase.CLEAN: (DiskPhase.AWAY,),
    DiskPhase.AWAY: (DiskPhase.READING, DiskPhase.LOST),
    DiskPhase.READING: (DiskPhase.CLEAN, DiskPhase.LOST),
    DiskPhase.LOST: (),
}
"""The phases that may follow each. From WRITING and CLEAN an entry may also leave the disk."""

_HELD: Final = (DiskPhase.CLEAN, DiskPhase.READING)
"""The phases in which a block of the pool is taken for which no entry is charged."""


@dataclass(slots=True)
class Disk:
    """The file's space, and the pool's bytes that blobs in each phase take or would take.

    `reserve` bytes of the pool are for reading blobs back, at least the largest chunk's.
    `by_session` has the bytes of each session in the file, `held_by_session` its part of
    `held_bytes`. `written` has the time at which the write of each generation in the file began,
    oldest first. `ended` says why the tier has ended; empty while it is in use.
    """

    space: Space
    reserve: int = 0
    by_phase: Counter[DiskPhase] = field(default_factory=Counter)
    by_session: Counter[int] = field(default_factory=Counter)
    held_by_session: Counter[int] = field(default_factory=Counter)
    written: dict[int, float] = field(default_factory=dict)
    ended: str = ""

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool for which no entry is charged: clean, or being read into."""
        return self.by_phase[DiskPhase.CLEAN] + self.by_phase[DiskPhase.READING]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pool that the blobs on disk take, or would take if they were read back."""
        return self.by_phase.total() - self.by_phase[DiskPhase.LOST]

    def loss(self) -> str:
        """Return, for people, why an entry is LOST."""
        return f"it was on disk alone, and the tier there has ended: {self.ended}"

    def assert_invariants(self, places: Collection[OnDisk]) -> None:
        """Raise AssertionError if the sums are not those of these places: for tests."""
        rooms: Counter[DiskPhase] = Counter()
        by_session: Counter[int] = Counter()
        held: Counter[int] = Counter()
        for place in places:
            rooms[place.phase] += place.pool_bytes
            by_session[place.session] += place.extent.nbytes
            if place.phase in _HELD:
                held[place.session] += place.pool_bytes
        assert rooms == self.by_phase
        assert by_session == self.by_session
        assert held == self.held_by_session
        assert held.total() == self.held_bytes
        assert self.written.keys() == {place.generation for place in places}
        self.space.assert_invariants()
        use = self.space.use()
        assert (use.used, use.promised) == (by_session.total(), 0)


@dataclass(slots=True, kw_only=True)
class OnDisk:
    """One entry's place in the tier. `nbytes` is its blob's size, `since` when its write began.

    `into` is the block that it is being read into. `order` is the place in the order of requests of
    the first restore that waits for it, 0 if none has been noted.
    """

    disk: Disk
    session: int
    generation: int
    extent: Block
    nbytes: int
    since: float
    phase: DiskPhase = DiskPhase.WRITING
    into: Block | None = None
    order: int = 0

    def __post_init__(self) -> None:
        self._count(self.pool_bytes)
        self.disk.by_session[self.session] += self.extent.nbytes
        self.disk.written[self.generation] = self.since

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that the blob takes there."""
        return granules(self.nbytes)

    @property
    def is_moving(self) -> bool:
        """Whether a thread of the tier uses block and extent."""
        return self.phase is DiskPhase.WRITING or self.phase is DiskPhase.READING

    def enter(self, phase: DiskPhase) -> None:
        """Enter another phase."""
        assert phase in _NEXT[self.phase], f"what is {self.phase} cannot be {phase}"
        self._count(-self.pool_bytes)
        self.phase = phase
        self._count(self.pool_bytes)

    def free(self) -> None:
        """Free the extent; no thread may be using it."""
        disk = self.disk
        self._count(-self.pool_bytes)
        del disk.written[self.generation]
        disk.by_session[self.session] -= self.extent.nbytes
        if not disk.by_session[self.session]:
            del disk.by_session[self.session]
        disk.space.release(self.extent)

    def _count(self, nbytes: int) -> None:
        """Add bytes of the pool, fewer if negative, to the sums of the phase."""
        disk = self.disk
        disk.by_phase[self.phase] += nbytes
        if self.phase in _HELD:
            disk.held_by_session[self.session] += nbytes
            if not disk.held_by_session[self.session]:
                del disk.held_by_session[self.session]
