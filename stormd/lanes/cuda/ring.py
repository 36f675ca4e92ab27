"""Ring allocation of ranges of a memory, for users that come and go in turn. Pure.

Ranges in use never overlap, and there are never more of them than allowed.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum, auto

__all__ = ["Ring", "RingPair", "Side"]


class Ring:
    """Allocates ranges within `bounds`, at most `most` at one time. Not thread-safe.

    A range of any size up to all of `bounds` is available at the latest when none is in use. Ranges
    can be reused soonest if they are given back in their order, but any order works. With
    `by_halves`, once no range was available, none is until half of everything is free.
    """

    def __init__(self, bounds: range, most: int, *, by_halves: bool) -> None:
        self._bounds = bounds
        self._most = most
        self._by_halves = by_halves
        self._is_full = False  # and, with `by_halves`, half of it is not free again yet
        self._used: deque[range] = deque()  # in the order in which they were taken

    def has(self, nbytes: int) -> bool:
        """Return whether a range of `nbytes` is available now."""
        if self._is_full and self._by_halves and not self._is_half_free():
            return False
        self._is_full = len(self._used) == self._most or self._find(nbytes) is None
        return not self._is_full

    def take(self, nbytes: int) -> range:
        """Return a range of `nbytes`, at least 1; `has` must have returned True for as many."""
        begin = self._find(nbytes)
        assert begin is not None, f"no range of {nbytes} bytes beside {self._used}"
        taken = range(begin, begin + nbytes)
        self._used.append(taken)
        return taken

    def give_back(self, taken: range) -> None:
        """Take back a range that is in use."""
        self._used.remove(taken)

    def touches(self, bounds: range) -> bool:
        """Return whether a range in use overlaps `bounds`."""
        return any(one.start < bounds.stop and bounds.start < one.stop for one in self._used)

    def move_to(self, bounds: range) -> None:
        """Allocate within other bounds from now on; the ranges in use must lie in them."""
        assert all(bounds.start <= one.start and one.stop <= bounds.stop for one in self._used)
        self._bounds = bounds
        self._is_full = False

    def _is_half_free(self) -> bool:
        used_bytes = sum(map(len, self._used))
        return 2 * used_bytes <= len(self._bounds) and 2 * len(self._used) <= self._most

    def _find(self, nbytes: int) -> int | None:
        """Return where a range of `nbytes` can begin: behind the newest one or at the start."""
        start, stop = self._bounds.start, self._bounds.stop
        if not self._used:
            return start if start + nbytes <= stop else None
        oldest, newest = self._used[0], self._used[-1]
        if newest.start < oldest.start:  # the ring has wrapped around
            return newest.stop if newest.stop + nbytes <= oldest.start else None
        if newest.stop + nbytes <= stop:
            return newest.stop
        return start if start + nbytes <= oldest.start else None


class Side(Enum):
    """One end of a memory that two rings share."""

    LOW = auto()
    HIGH = auto()


class RingPair:
    """Two rings in one memory: an end for each, and the middle for one of them at a time.

    A ring whose end is full also gets the middle, unless the other ring has a range in it. So for
    up to `end` bytes, neither ring ever waits for the other, whatever the other waits for. Any
    thread may call.
    """

    def __init__(self, end: int, middle: int, most: int, *, by_halves: bool) -> None:
        self.nbytes = 2 * end + middle
        self._lock = threading.Lock()
        self._middle = range(end, end + middle)
        self._ends = {Side.LOW: range(end), Side.HIGH: range(end + middle, self.nbytes)}
        self._more = {Side.LOW: range(end + middle), Side.HIGH: range(end, self.nbytes)}
        self._rings = {side: Ring(self._ends[side], most, by_halves=by_halves) for side in Side}
        self._owner: Side | None = None
        """The side that has the middle."""
        self._may_take: set[Side] = set()
        """The sides for which `has` returned True and that have not called `take` since."""

    def has(self, side: Side, nbytes: int) -> bool:
        """Return whether a side can have a range of `nbytes` now."""
        with self._lock:
            ring = self._rings[side]
            if not ring.has(nbytes) and not (self._gets_middle(side) and ring.has(nbytes)):
                return False
            self._may_take.add(side)
            return True

    def take(self, side: Side, nbytes: int) -> range:
        """Return a range of `nbytes`, at least 1; `has` must have returned True for as many."""
        with self._lock:
            self._may_take.discard(side)
            return self._rings[side].take(nbytes)

    def give_back(self, side: Side, taken: range) -> None:
        """Take back a range that this side has in use."""
        with self._lock:
            self._rings[side].give_back(taken)

    def _gets_middle(self, side: Side) -> bool:
        """Give the middle to a side if it may have it; return whether its space has grown."""
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
