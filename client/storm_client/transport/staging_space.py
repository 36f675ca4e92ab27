"""Which ranges of the staging area are in use: an allocator without the area's memory."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque

from storm_client.lanes import Slot

__all__ = ["ALIGNMENT", "StagingSpace"]

ALIGNMENT = 64
"""Alignment of staging slots in bytes: a cache line, and a multiple of every dtype's size."""


class _Used(weakref.ref[Slot]):
    """A reserved slot and its range; there is no range before the reservation is complete."""

    begin = end = -1


class StagingSpace:
    """Which ranges of the staging area are in use: a first-fit allocator.

    Free neighbours are merged at once, so the area is one range again when all slots have been
    freed, in whatever order. A slot may lose its last reference without being freed, if an
    interrupt comes between its reservation and its use. Its range is freed by the next `allocate`.
    Both tables change in statements without a call, where Python checks for no signal.
    """

    def __init__(self, nbytes: int) -> None:
        """Start with everything free; a tail shorter than ALIGNMENT is not used."""
        self.capacity = nbytes - nbytes % ALIGNMENT
        self._free = [(0, self.capacity)] if self.capacity else []  # begins and ends
        self._used: dict[int, _Used] = {}
        self._dropped: deque[_Used] = deque()
        """Slots that lost their last reference without having been freed."""

    @property
    def free_bytes(self) -> int:
        """The number of free bytes, over all free ranges."""
        return sum(end - begin for begin, end in self._free)

    def allocate(self, nbytes: int) -> Slot | None:
        """Return a slot of `nbytes`, None if no free range is that long."""
        self.reclaim()
        size = _aligned(nbytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                slot = Slot(begin, nbytes)
                used = _Used(slot, self._dropped.append)
                used.begin, used.end = begin, begin + size
                left = [(begin + size, end)] if begin + size < end else []
                self._free[index : index + 1] = left
                self._used[begin] = used
                return slot
        return None

    def free(self, slot: Slot) -> None:
        """Free the range of a slot that `allocate` has returned."""
        self._free_range(self._used[slot.offset])

    def reclaim(self) -> None:
        """Free the ranges of slots that nobody refers to."""
        while self._dropped:
            used = self._dropped[0]
            if self._used.get(used.begin) is used:
                self._free_range(used)
            self._dropped.popleft()

    def _free_range(self, used: _Used) -> None:
        begin, end = used.begin, used.end
        first = last = bisect_left(self._free, (begin, end))
        if first and self._free[first - 1][1] == begin:
            first -= 1
            begin = self._free[first][0]
        if last < len(self._free) and self._free[last][0] == end:
            end = self._free[last][1]
            last += 1
        del self._used[used.begin]
        self._free[first:last] = [(begin, end)]

    def assert_invariants(self) -> None:
        """Check that free and used ranges tile the area and that no two free ones touch."""
        reached = 0
        for begin, end in sorted(
            [*self._free, *((one.begin, one.end) for one in self._used.values())]
        ):
            assert begin == reached, f"a gap or overlap at {reached}: the next range is at {begin}"
            assert end > begin, f"an empty range at {begin}"
            reached = end
        assert reached == self.capacity, f"ranges end at {reached}, the area at {self.capacity}"
        ends = {end for _, end in self._free}
        assert ends.isdisjoint(begin for begin, _ in self._free), "two free ranges touch"


def _aligned(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
