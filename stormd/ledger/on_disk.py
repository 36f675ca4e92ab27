"""Where an entry is that was written to the tier on disk, and how all of that adds up.

An entry's place is a block of the pool, an extent of the file, or both. These hold state only; what
happens when is decided in spills.py.

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
    """Where the blob is. While it is WRITING or READING a thread of the tier uses both places."""

    WRITING = auto()
    """Whole in the pool, not yet on the disk."""

    CLEAN = auto()
    """Whole in both: the block can be given back at once."""

    AWAY = auto()
    """On the disk alone."""

    READING = auto()
    """On the disk, and not yet whole in the block that is set aside for it."""

    LOST = auto()
    """It was on the disk alone when the tier ended."""

    __hash__ = object.__hash__  # an Enum's own is a call of Python, at every look at a sum


_NEXT: Final = {
    DiskPhase.WRITING: (DiskPhase.CLEAN,),
    DiskPhase.CLEAN: (DiskPhase.AWAY,),
    DiskPhase.AWAY: (DiskPhase.READING, DiskPhase.LOST),
    DiskPhase.READING: (DiskPhase.CLEAN, DiskPhase.LOST),
    DiskPhase.LOST: (),
}
"""What may follow each; from WRITING and CLEAN an entry may also go back to the pool alone."""


@dataclass(slots=True)
class Disk:
    """The file's space, and the pool's bytes that blobs in each phase take or would take.

    `by_session` is what each session has in the file, `written` since when each generation that is
    there has been written, the oldest first. `ended` says why the tier is of no use any more; empty
    while it is.
    """

    space: Space
    rooms: Counter[DiskPhase] = field(default_factory=Counter)
    by_session: Counter[int] = field(default_factory=Counter)
    written: dict[int, float] = field(default_factory=dict)
    ended: str = ""

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool for which no entry is charged: clean, or being read into."""
        return self.rooms[DiskPhase.CLEAN] + self.rooms[DiskPhase.READING]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pool that what is on the disk takes, or would take there."""
        return self.rooms.total() - self.rooms[DiskPhase.LOST]

    def loss(self) -> str:
        """Return, for people, what became of an entry that is LOST."""
        return f"it was on disk alone, and the tier there has ended: {self.ended}"

    def assert_invariants(self, places: Collection[OnDisk]) -> None:
        """Raise AssertionError where the sums are not those of these places: for tests."""
        rooms: Counter[DiskPhase] = Counter()
        by_session: Counter[int] = Counter()
        for place in places:
            rooms[place.phase] += place.room
            by_session[place.session] += place.extent.nbytes
        assert rooms == self.rooms
        assert by_session == self.by_session
        assert self.written.keys() == {place.generation for place in places}
        self.space.assert_invariants()
        use = self.space.use()
        assert (use.used, use.promised) == (by_session.total(), 0)


@dataclass(slots=True, kw_only=True)
class OnDisk:
    """One entry's part in the tier. `nbytes` is its blob's, `since` when it was written.

    `into` is the block that it is being read into. `order` is the place of the first restore that
    waits for it, 0 where none has been noted.
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
        self.disk.rooms[self.phase] += self.room
        self.disk.by_session[self.session] += self.extent.nbytes
        self.disk.written[self.generation] = self.since

    @property
    def room(self) -> int:
        """Bytes of the pool that the blob takes there."""
        return granules(self.nbytes)

    @property
    def is_moving(self) -> bool:
        """Whether a thread of the tier uses block and extent."""
        return self.phase is DiskPhase.WRITING or self.phase is DiskPhase.READING

    def enter(self, phase: DiskPhase) -> None:
        """Go on to another phase."""
        assert phase in _NEXT[self.phase], f"what is {self.phase} cannot be {phase}"
        self.disk.rooms[self.phase] -= self.room
        self.disk.rooms[phase] += self.room
        self.phase = phase

    def leave(self) -> None:
        """Give the extent back: what is there is nobody's any more. No thread uses it."""
        disk = self.disk
        disk.rooms[self.phase] -= self.room
        del disk.written[self.generation]
        disk.by_session[self.session] -= self.extent.nbytes
        if not disk.by_session[self.session]:
            del disk.by_session[self.session]
        disk.space.release(self.extent)
