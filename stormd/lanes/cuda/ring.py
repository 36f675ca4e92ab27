"""Which ranges of a memory are in use by what comes and goes in turn: a pure ring.

Ranges that are handed out never overlap, and there are never more of them than were allowed. A
range of up to the whole ring is to be had at the latest when none is in use.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Ring"]


class Ring:
    """Hands out ranges of `capacity` bytes, `most` at one time. Not thread-safe.

    Ranges are quickest to be used again if they are given back in their order, but need not be.
    With `by_halves`, once there was no range to be had, there is none until half of all is free.
    """

    def __init__(self, capacity: int, most: int, *, by_halves: bool) -> None:
        """Start with everything free."""
        self._capacity = capacity
        self._most = most
        self._by_halves = by_halves
        self._is_full = False  # and half of it not free again yet, where that is asked for
        self._used: deque[range] = deque()  # in the order in which they were handed out

    def has(self, nbytes: int) -> bool:
        """Tell whether a range of `nbytes` is to be had now."""
        if self._is_full and self._by_halves and not self._is_half_free():
            return False
        self._is_full = len(self._used) == self._most or self._find(nbytes) is None
        return not self._is_full

    def take(self, nbytes: int) -> range:
        """Return a range of `nbytes`, at least one; `has` has said that there is one as long."""
        begin = self._find(nbytes)
        assert begin is not None, f"no range of {nbytes} bytes beside {self._used}"
        taken = range(begin, begin + nbytes)
        self._used.append(taken)
        return taken

    def give_back(self, taken: range) -> None:
        """Take a range back that was handed out."""
        self._used.remove(taken)

    def _is_half_free(self) -> bool:
        used_bytes = sum(map(len, self._used))
        return 2 * used_bytes <= self._capacity and 2 * len(self._used) <= self._most

    def _find(self, nbytes: int) -> int | None:
        """Return where a range of `nbytes` begins: behind the last one, or at the start again."""
        if not self._used:
            return 0 if nbytes <= self._capacity else None
        oldest, newest = self._used[0], self._used[-1]
        if newest.start < oldest.start:  # it has begun again
            return newest.stop if newest.stop + nbytes <= oldest.start else None
        if newest.stop + nbytes <= self._capacity:
            return newest.stop
        return 0 if nbytes <= oldest.start else None
