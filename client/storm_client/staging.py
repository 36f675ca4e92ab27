"""Which ranges of the staging area are in use: a pure first-fit allocator.

What stays true: ranges handed out never overlap, and free neighbours are always merged, so that
the area is whole again when everything has been given back, in whatever order.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["ALIGNMENT", "StagingSpace"]

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""


class StagingSpace:
    """Hands out ranges of `nbytes`. Not thread-safe: the session's lock protects it."""

    def __init__(self, nbytes: int) -> None:
        """Start with everything free; a tail shorter than ALIGNMENT is not used."""
        self.capacity = nbytes - nbytes % ALIGNMENT
        self.free_bytes = self.capacity
        self._starts = [0] if self.capacity else []
        self._sizes = [self.capacity] if self.capacity else []
        self._used: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of `nbytes`, None where no free range is that long."""
        size = _aligned(nbytes)
        for index, free in enumerate(self._sizes):
            if free >= size:
                return self._take(index, size)
        return None

    def free(self, offset: int) -> None:
        """Give the range at `offset` back; it must have been handed out."""
        size = self._used.pop(offset)
        self.free_bytes += size
        index = bisect_left(self._starts, offset)
        self._starts.insert(index, offset)
        self._sizes.insert(index, size)
        self._merge_with_next(index)
        if index:
            self._merge_with_next(index - 1)

    def assert_invariants(self) -> None:
        """Check that free and used ranges tile the area and that no two free ones touch."""
        ranges = sorted([*zip(self._starts, self._sizes, strict=True), *self._used.items()])
        end = 0
        for start, size in ranges:
            assert start == end, f"a gap or overlap at {end}: the next range starts at {start}"
            assert size > 0, f"an empty range at {start}"
            end += size
        assert end == self.capacity, f"ranges end at {end}, the area at {self.capacity}"
        assert sum(self._sizes) == self.free_bytes, "free_bytes disagrees with the free ranges"
        ends = {start + size for start, size in zip(self._starts, self._sizes, strict=True)}
        assert ends.isdisjoint(self._starts), "two free ranges touch"

    def _take(self, index: int, size: int) -> int:
        offset = self._starts[index]
        if self._sizes[index] == size:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index] += size
            self._sizes[index] -= size
        self._used[offset] = size
        self.free_bytes -= size
        return offset

    def _merge_with_next(self, index: int) -> None:
        if index + 1 >= len(self._starts):
            return
        if self._starts[index] + self._sizes[index] == self._starts[index + 1]:
            self._sizes[index] += self._sizes[index + 1]
            del self._starts[index + 1], self._sizes[index + 1]


def _aligned(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
