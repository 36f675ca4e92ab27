"""Where blobs lie in the pool: promises of space and placed blocks, as numbers only.

Every byte of the space is free or belongs to exactly one block. No two free extents touch. Promised
bytes never exceed the free bytes, so every promise can be placed: `place` cannot fail. The memory
itself is in `host_pool`.

A block's size is known only after encoding, and reserving the worst case would leave a hole behind
every block. So admission promises a number of bytes, and placement takes the exact size, from
several extents if no single one is large enough.

A space may begin with only some of its memory and receive the rest as it fills. Memory that is not
there yet is neither free nor promised.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = ["GRANULE", "Block", "Extent", "Space", "SpaceUse", "granules", "slack_of"]

GRANULE: Final = 256
"""Offsets and sizes of extents are multiples of so many bytes. It is a blob's own section
alignment, so that vector loads on a blob in the pool are aligned as the format guarantees."""


class Extent(NamedTuple):
    """A contiguous range of the space, in bytes; both numbers are multiples of GRANULE."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """The place of one blob: its `nbytes` bytes fill the extents in order."""

    extents: tuple[Extent, ...]
    nbytes: int
    offset: int | None = field(init=False)
    """The blob's offset if it is contiguous, else None."""

    def __post_init__(self) -> None:
        whole = self.extents[0].offset if len(self.extents) == 1 else None
        object.__setattr__(self, "offset", whole)

    def used_extents(self) -> list[Extent]:
        """Return the ranges that hold the blob's bytes, the last one cut to the blob's end."""
        pieces, left = [], self.nbytes
        for offset, nbytes in self.extents:
            pieces.append(Extent(offset, min(nbytes, left)))
            left -= min(nbytes, left)
        return pieces


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """How full a space is, in bytes. `promised` is not yet placed and not part of `used`.

    `ready` is how much may be used and promised together now. `capacity` is how much once the rest
    of the memory has been added, or the same as `ready` if no more can be had.
    """

    capacity: int
    used: int
    promised: int
    peak_used: int
    largest_free: int
    ready: int

    @property
    def taken(self) -> int:
        """The bytes that are used or promised."""
        return self.used + self.promised


def granules(nbytes: int, granule: int = GRANULE) -> int:
    """Return the bytes that a block of `nbytes` takes: `nbytes` rounded up to whole granules."""
    return -(-nbytes // granule) * granule


def slack_of(capacity: int) -> int:
    """Return the slack to add to a space of `capacity` so that it does not fragment when full.

    Without slack, each block is put together from the gaps between others, and each block cuts
    these gaps finer (DESIGN.md has the measurement). With a slack of 1/32, a block typically has
    two extents.
    """
    return granules(capacity // 32)


class Space:
    """`capacity` bytes to be promised, placed and released, in whole granules.

    They lie in `capacity` + `slack` bytes of the pool, from `base` on. `capacity` is rounded down
    to granules, the others must be whole granules. The first `committed` bytes are there from the
    start, or all if it is None; `grow` adds more. A file has larger granules than the pool.

    Thread-safe: lanes place blocks from their workers; all other calls come from the event loop.
    """

    def __init__(
        self,
        capacity: int,
        base: int = 0,
        slack: int = 0,
        *,
        committed: int | None = None,
        granule: int = GRANULE,
    ) -> None:
        assert base % granule == slack % granule == 0, f"{base} or {slack} bytes cut a granule"
        self.granule: Final = granule
        self.base: Final = base
        self.capacity: Final = capacity // granule * granule
        self.end: Final = base + self.capacity + slack
        self._lock = threading.Lock()  # protects all below
        self._committed = 0
        self._ready = 0
        self._wanted = 0
        self._may_grow = True
        self._promised = 0
        self._used = 0
        self._peak = 0
        self._by_start: dict[int, int] = {}  # free extents: start -> bytes
        self._by_end: dict[int, int] = {}  # the same: end -> start
        self._by_size: list[tuple[int, int]] = []  # the same, sorted: (bytes, start)
        self.grow(self.end - base if committed is None else committed)

    def adopt(self, blocks: Iterable[Block], promised: int) -> None:
        """Make a space that nobody has used yet hold these blocks, and `promised` bytes besides.

        Raises:
            ValueError: two blocks overlap, one lies outside of the memory there is, or together
                they exceed the space; then the space is unusable.
        """
        extents = sorted(extent for block in blocks for extent in block.extents)
        with self._lock:
            assert not self._used + self._promised, "a space that is in use adopts nothing"
            for start, size in list(self._by_start.items()):
                self._remove_free(start)
                assert (start, size) == (self.base, self._committed)
            at, end = self.base, self.base + self._committed
            for start, size in [*extents, Extent(end, 0)]:
                if start < at or start + size > end or start % GRANULE or size % GRANULE:
                    raise ValueError(
                        f"{size} bytes at {start} of a pool with {end} bytes, of which those up to "
                        f"{at} are taken"
                    )
                if start > at:
                    self._add_free(at, start - at)
                at = start + size
                self._used += size
            self._peak = self._used
            self._promised = granules(promised)
            if self._used + self._promised > self._ready:
                raise ValueError(
                    f"{self._used} bytes are used and {promised} promised of {self._ready}"
                )

    # --- the memory there is ----------------------------------------------------------------

    @property
    def committed(self) -> int:
        """The bytes of memory that are there, from `base` on."""
        return self._committed

    @property
    def taken(self) -> int:
        """The bytes that are used or promised."""
        return self._used + self._promised

    @property
    def is_growing(self) -> bool:
        """Whether more memory may be added."""
        return self._may_grow and self._ready < self.capacity

    @property
    def wanted(self) -> int:
        """How many `ready` bytes somebody waits for; 0 if nobody waits."""
        return self._wanted

    def grow(self, nbytes: int) -> None:
        """Add the next `nbytes` of memory, which are there from now on."""
        assert nbytes % self.granule == 0, f"{nbytes} bytes cut a granule"
        assert self.base + self._committed + nbytes <= self.end, (
            "more memory than there is room for"
        )
        with self._lock:
            if self.capacity and nbytes:
                self._free(self.base + self._committed, nbytes)
            self._committed += nbytes
            self._ready = self._ready_of(self._committed)
            self._wanted = 0 if self._wanted <= self._ready else self._wanted

    def shrink(self, nbytes: int) -> bool:
        """Remove the last `nbytes` of memory; return False, unchanged, if something needs them."""
        with self._lock:
            end = self.base + self._committed
            free_from = self._by_end.get(end)
            if free_from is None or free_from > end - nbytes:
                return False
            ready = self._ready_of(self._committed - nbytes)
            if self._used + self._promised > ready:
                return False
            self._remove_free(free_from)
            if free_from < end - nbytes:
                self._add_free(free_from, end - nbytes - free_from)
            self._committed -= nbytes
            self._ready = ready
            return True

    def allow_growth(self, *, allowed: bool) -> None:
        """Set whether more memory can be had; while it cannot, nobody waits for it."""
        with self._lock:
            self._may_grow = allowed
            self._wanted = self._wanted if allowed else 0

    def request_growth(self, nbytes: int) -> bool:
        """Note that somebody waits for memory for `nbytes`, or for as much as ever fits.

        Return False, unchanged, if so much is there, or no more can be had.
        """
        with self._lock:
            wanted = self._taken_with(nbytes)
            if wanted <= self._ready or not self._may_grow:
                return False
            self._wanted = max(self._wanted, wanted)
            return True

    # --- promises and blocks ----------------------------------------------------------------

    def promise(self, nbytes: int, *, keep: int = 0) -> bool:
        """Reserve space for a block of up to `nbytes`; return False, unchanged, if there is none.

        `keep` is the number of bytes that must be left for others then.
        """
        wanted = granules(nbytes, self.granule)
        with self._lock:
            if self._used + self._promised + wanted + keep > self._ready:
                return False
            self._promised += wanted
            return True

    def withdraw(self, promised: int) -> None:
        """Cancel a promise of `promised` bytes that was not placed."""
        with self._lock:
            self._unpromise(promised)

    def place(self, promised: int, nbytes: int) -> Block:
        """Turn a promise of `promised` bytes into a block of `nbytes`, which is at most that.

        Takes the smallest free extent that holds the block, so that large extents stay large. If
        none does, takes the largest extents one by one, and for the rest the smallest that holds
        it. A full pool often has one of exactly that size, and each cut that is avoided is one
        extent less in every block that will lie there.

        Raises:
            AssertionError: `nbytes` is 0 or more than was promised; nothing has changed. It is
                raised also by an interpreter with assertions off, since others' blocks are at
                stake.
        """
        if not 0 < nbytes <= promised:
            raise AssertionError(f"{nbytes} bytes placed on a promise of {promised}")
        with self._lock:
            self._unpromise(promised)
            wanted = granules(nbytes, self.granule)
            self._used += wanted
            self._peak = max(self._peak, self._used)
            return Block(tuple(self._take(wanted)), nbytes)

    def release(self, block: Block) -> None:
        """Free a block. Each block may be freed once."""
        with self._lock:
            self._give_back(block)

    def unplace(self, block: Block, promised: int) -> None:
        """Undo `place`: the block is free again, and the promise stands again."""
        with self._lock:
            self._give_back(block)
            self._promised += granules(promised, self.granule)

    def use(self) -> SpaceUse:
        """Return how full the space is."""
        with self._lock:
            largest = self._by_size[-1][0] if self._by_size else 0
            capacity = self.capacity if self._may_grow else self._ready
            return SpaceUse(capacity, self._used, self._promised, self._peak, largest, self._ready)

    def assert_invariants(self) -> None:
        """Raise AssertionError if the space is inconsistent: for tests."""
        with self._lock:
            free = sorted(self._by_start.items())
            assert sorted((size, start) for start, size in free) == self._by_size
            assert {start + size: start for start, size in free} == self._by_end
            assert sum(size for _, size in free) == self._committed - self._used
            assert 0 <= self._promised <= self._ready - self._used
            assert 0 <= self._used <= self._peak <= self.capacity
            assert self._used <= self._ready <= self.capacity
            assert self._wanted == 0 or self._ready < self._wanted <= self.capacity
            for start, size in free:
                assert start % self.granule == 0 < size
                assert size % self.granule == 0
            ends = [self.base, *(start + size for start, size in free)]
            for end, (start, _) in zip(ends[1:], free[1:], strict=False):
                assert end < start, "free extents touch or overlap"
            assert ends[-1] <= self.base + self._committed <= self.end

    # --- called with the lock held ----------------------------------------------------------

    def _ready_of(self, committed: int) -> int:
        """Return how much of so much memory may be used: all but its share of the slack."""
        share = committed * self.capacity // max(1, self.end - self.base)
        return share // self.granule * self.granule

    def _taken_with(self, nbytes: int) -> int:
        """Return the bytes taken after `nbytes` more, limited to the capacity."""
        return min(self._used + self._promised + granules(nbytes, self.granule), self.capacity)

    def _unpromise(self, promised: int) -> None:
        self._promised -= granules(promised, self.granule)
        assert self._promised >= 0, "more promises ended than were given"

    def _give_back(self, block: Block) -> None:
        for offset, nbytes in block.extents:
            self._used -= nbytes
            self._free(offset, nbytes)

    def _take(self, wanted: int) -> list[Extent]:
        taken = []
        while wanted:
            index = bisect_left(self._by_size, (wanted, 0))
            size, start = self._by_size[min(index, len(self._by_size) - 1)]
            taken.append(self._cut(start, min(size, wanted)))
            wanted -= taken[-1].nbytes
        return taken

    def _cut(self, start: int, wanted: int) -> Extent:
        """Take `wanted` bytes from the front of the free extent at `start`."""
        size = self._remove_free(start)
        if size > wanted:
            self._add_free(start + wanted, size - wanted)
        return Extent(start, wanted)

    def _free(self, start: int, size: int) -> None:
        """Make a range free, and merge it with the free ranges that touch it."""
        before = self._by_end.get(start)
        if before is not None:
            size += self._remove_free(before)
            start = before
        if start + size in self._by_start:
            size += self._remove_free(start + size)
        self._add_free(start, size)

    def _add_free(self, start: int, size: int) -> None:
        self._by_start[start] = size
        self._by_end[start + size] = start
        insort(self._by_size, (size, start))

    def _remove_free(self, start: int) -> int:
        size = self._by_start.pop(start)
        del self._by_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
