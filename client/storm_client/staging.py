"""Which ranges of the staging area are in use: a first-fit allocator, pure.

Free neighbours are merged at once, so the area is whole again when everything has been given back,
in whatever order.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["ALIGNMENT", "StagingSpace"]

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""


class StagingSpace:
    """Hands out ranges of `nbytes`. Not thread-safe: the session's lock protects it.

    What is free changes by one assignment, so whatever interrupts a method, as Ctrl-C does, loses
    its range at the worst, and never has one handed out twice.
    """

    def __init__(self, nbytes: int) -> None:
        """Start with everything free; a tail shorter than ALIGNMENT is not used."""
        self.capacity = nbytes - nbytes % ALIGNMENT
        self._free = [(0, self.capacity)] if self.capacity else []  # begins and ends
        self._used: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """How much is free, in however many ranges."""
        return sum(end - begin for begin, end in self._free)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of `nbytes`, None where no free range is that long."""
        size = _aligned(nbytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(begin + size, end)] if begin + size < end else []
                self._used[begin] = size
                return begin
        return None

    def free(self, offset: int) -> None:
        """Give the range at `offset` back; it must have been handed out."""
        begin, end = offset, offset + self._used.pop(offset)
        first = last = bisect_left(self._free, (begin, end))
        if first and self._free[first - 1][1] == begin:
            first -= 1
            begin = self._free[first][0]
        if last < len(self._free) and self._free[last][0] == end:
            end = self._free[last][1]
            last += 1
        self._free[first:last] = [(begin, end)]

    def assert_invariants(self) -> None:
        """Check that free and used ranges tile the area and that no two free ones touch."""
        used = [(begin, begin + size) for begin, size in self._used.items()]
        reached = 0
        for begin, end in sorted([*self._free, *used]):
            assert begin == reached, f"a gap or overlap at {reached}: the next range is at {begin}"
            assert end > begin, f"an empty range at {begin}"
            reached = end
        assert reached == self.capacity, f"ranges end at {reached}, the area at {self.capacity}"
        ends = {end for _, end in self._free}
        assert ends.isdisjoint(begin for begin, _ in self._free), "two free ranges touch"


def _aligned(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
