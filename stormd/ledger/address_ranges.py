"""Which parts of a reserved address range are mapped, so that no job names unmapped ones. Pure.

A kernel that uses an unmapped address breaks the device for all sessions.
"""

from __future__ import annotations

from bisect import bisect_right, insort

__all__ = ["AddressRange"]


class AddressRange:
    """A range of `nbytes` addresses; the pieces mapped in it do not overlap."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}  # by the piece's begin

    def problem(self, begin: int, nbytes: int) -> str:
        """Return why no piece can be mapped there; empty if one can."""
        end = begin + nbytes
        if end > self.nbytes:
            return f"bytes {begin} to {end} lie outside a range of {self.nbytes}"
        index = bisect_right(self._begins, begin)
        is_taken = index > 0 and self._ends[self._begins[index - 1]] > begin
        is_cut = index < len(self._begins) and self._begins[index] < end
        return f"some of bytes {begin} to {end} are mapped already" if is_taken or is_cut else ""

    def add(self, begin: int, nbytes: int) -> None:
        """Note that a piece is mapped at addresses that were free."""
        insort(self._begins, begin)
        self._ends[begin] = begin + nbytes

    def remove(self, begin: int) -> int:
        """Note that the piece that begins there is unmapped; return its size in bytes."""
        self._begins.remove(begin)
        return self._ends.pop(begin) - begin

    def covers(self, begin: int, end: int) -> bool:
        """Return whether all bytes from `begin` to `end` are mapped."""
        index = bisect_right(self._begins, begin) - 1
        if index < 0:
            return False
        reached = self._ends[self._begins[index]]
        while reached < end:
            if reached not in self._ends:
                return False
            reached = self._ends[reached]
        return begin < reached

    def assert_invariants(self) -> None:
        """Check that pieces are in order, do not overlap, and are inside the range."""
        assert sorted(self._ends) == self._begins
        reached = 0
        for begin in self._begins:
            assert reached <= begin < self._ends[begin]
            reached = self._ends[begin]
        assert reached <= self.nbytes
