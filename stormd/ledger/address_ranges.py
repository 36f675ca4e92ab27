"""What of a reserved range of addresses is mapped, so that no job names what is not there: pure.

On a device a kernel that uses an address at which nothing is mapped breaks it for all sessions.
"""

from __future__ import annotations

from bisect import bisect_right, insort

__all__ = ["AddressRange"]


class AddressRange:
    """`nbytes` of addresses; pieces that are mapped at some of them do not overlap."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}  # by where the piece begins

    def problem(self, begin: int, nbytes: int) -> str:
        """Return why no piece can be mapped there; empty where one can."""
        end = begin + nbytes
        if end > self.nbytes:
            return f"bytes {begin} to {end} lie outside a range of {self.nbytes}"
        index = bisect_right(self._begins, begin)
        is_taken = index > 0 and self._ends[self._begins[index - 1]] > begin
        is_cut = index < len(self._begins) and self._begins[index] < end
        return f"some of bytes {begin} to {end} are mapped already" if is_taken or is_cut else ""

    def add(self, begin: int, nbytes: int) -> None:
        """Note that a piece is mapped, where nothing was."""
        insort(self._begins, begin)
        self._ends[begin] = begin + nbytes

    def remove(self, begin: int) -> int:
        """Note that the piece that begins there is not mapped any more; return its bytes."""
        self._begins.remove(begin)
        return self._ends.pop(begin) - begin

    def covers(self, begin: int, end: int) -> bool:
        """Tell whether all of these bytes are mapped."""
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
        """Check that pieces are in order, do not overlap, and lie in the range."""
        assert sorted(self._ends) == self._begins
        reached = 0
        for begin in self._begins:
            assert reached <= begin < self._ends[begin]
            reached = self._ends[begin]
        assert reached <= self.nbytes
