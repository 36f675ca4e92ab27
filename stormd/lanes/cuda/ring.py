"""Which ranges of a memory are in use by what comes and goes in turn: pure rings.

Ranges that are handed out never overlap, and there are never more of them than were allowed.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum, auto

__all__ = ["Ring", "RingPair", "Side"]


class Ring:
    """Hands out ranges within `bounds`, `most` at one time. Not thread-safe.

    A range of up to all of it is to be had at the latest when none is in use. Ranges are quickest
    to be used again if they are given back in their order, but need not be. With `by_halves`, once
    there was no range to be had, there is none until half of all is free.
    """

    def __init__(self, bounds: range, most: int, *, by_halves: bool) -> None:
        self._bounds = bounds
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

    def touches(self, bounds: range) -> bool:
        """Tell whether a range in use reaches into `bounds`."""
        return any(one.start < bounds.stop and bounds.start < one.stop for one in self._used)

    def move_to(self, bounds: range) -> None:
        """Hand out ranges within other bounds from now on; what is in use lies in them, too."""
        assert all(bounds.start <= one.start and one.stop <= bounds.stop for one in self._used)
        self._bounds = bounds
        self._is_full = False

    def _is_half_free(self) -> bool:
        used_bytes = sum(map(len, self._used))
        return 2 * used_bytes <= len(self._bounds) and 2 * len(self._used) <= self._most

    def _find(self, nbytes: int) -> int | None:
        """Return where a range of `nbytes` begins: behind the last one, or at the start again."""
        start, stop = self._bounds.start, self._bounds.stop
        if not self._used:
            return start if start + nbytes <= stop else None
        oldest, newest = self._used[0], self._used[-1]
        if newest.start < oldest.start:  # it has begun again
            return newest.stop if newest.stop + nbytes <= oldest.start else None
        if newest.stop + nbytes <= stop:
            return newest.stop
        return start if start + nbytes <= oldest.start else None


class Side(Enum):
    """An end of a memory that two rings share."""

    LOW = auto()
    HIGH = auto()


class RingPair:
    """Two rings in one memory: an end for each, and the middle for one of them at a time.

    A ring whose end is full gets the middle, too, unless the other has something there. So for
    `end` bytes neither ever waits for the other, whatever that waits for. Any thread may call.
    """

    def __init__(self, end: int, middle: int, most: int, *, by_halves: bool) -> None:
        self.nbytes = 2 * end + middle
        self._lock = threading.Lock()
        self._middle = range(end, end + middle)
        self._ends = {Side.LOW: range(end), Side.HIGH: range(end + middle, self.nbytes)}
        self._more = {Side.LOW: range(end + middle), Side.HIGH: range(end, self.nbytes)}
        self._rings = {side: Ring(self._ends[side], most, by_halves=by_halves) for side in Side}
        self._owner: Side | None = None
        """Who has the middle."""
        self._may_take: set[Side] = set()
        """Who was told that there is room, and has not taken it yet."""

    def has(self, side: Side, nbytes: int) -> bool:
        """Tell whether a side can have a range of `nbytes` now."""
        with self._lock:
            ring = self._rings[side]
            if not ring.has(nbytes) and not (self._gets_middle(side) and ring.has(nbytes)):
                return False
            self._may_take.add(side)
            return True

    def take(self, side: Side, nbytes: int) -> range:
        """Return a range of `nbytes`, at least one; `has` has said that there is one as long."""
        with self._lock:
            self._may_take.discard(side)
            return self._rings[side].take(nbytes)

    def give_back(self, side: Side, taken: range) -> None:
        """Take a range back that was handed out to that side."""
        with self._lock:
            self._rings[side].give_back(taken)

    def _gets_middle(self, side: Side) -> bool:
        """Give the middle to a side if it may have it; tell whether it has more room now."""
        owner = self._owner
        if owner is side:
            return False
        if owner is not None:
            if owner in self._may_take or self._rings[owner].touches(self._middle):
                return False
            self._rings[owner].move_to(self._ends[owner])
        self._owner = side
        self._rings[side].move_to(self._more[side])
        return True
