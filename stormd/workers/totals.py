"""What each user holds in all worker processes: numbers in memory that these share.

Every number has one writer: a worker writes its own row, and reads all. Whoever wants more writes
first what it would hold then, and reads afterwards what the others do: of two that do so at once at
least one sees the other, so together they never hold more than they may. Nobody waits for anybody,
and a worker that was killed leaves a row that the front clears.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Final

__all__ = ["MOST_USERS", "UserTotals"]

MOST_USERS: Final = 1 << 16
"""Who may have a number at all: as many as there may be sessions."""

NUMBER_BYTES: Final = 8


class UserTotals:
    """The bytes of the pool that each user holds in `workers` processes, of which one is `own`.

    `descriptor` is the memory's, which has been made by `make`, and stays the caller's.
    """

    def __init__(self, descriptor: int, workers: int, own: int) -> None:
        self._map = mmap.mmap(descriptor, workers * MOST_USERS * NUMBER_BYTES)
        self._numbers = memoryview(self._map).cast("q")
        self._workers = workers
        self._own = own
        self._places: dict[int, int] = {}
        # Given back and taken again, it orders a write before the reads that follow it, on every
        # processor: what was written is there for others before what they wrote is read here.
        self._fence = threading.Lock()
        self._fence.acquire()

    @staticmethod
    def make(workers: int) -> int:
        """Return the descriptor of such memory, all zero."""
        descriptor = os.memfd_create("stormd-totals", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, workers * MOST_USERS * NUMBER_BYTES)
        return descriptor

    def know(self, uid: int, place: int) -> None:
        """Note which number is a user's: the front says so before it hands over a session."""
        self._places[uid] = place

    def hold(self, uid: int, nbytes: int) -> None:
        """Note what a user holds in this process."""
        self._numbers[self._own * MOST_USERS + self._places[uid]] = nbytes

    def claim(self, uid: int, nbytes: int) -> int:
        """Note that a user wants to hold so much here; return what it holds in the others.

        Where that is too much together, `hold` must follow with what it holds.
        """
        self.hold(uid, nbytes)
        self._fence.release()
        self._fence.acquire()
        place = self._places[uid]
        rows = range(self._workers)
        return sum(self._numbers[row * MOST_USERS + place] for row in rows if row != self._own)

    def clear(self, row: int) -> None:
        """Note that a worker that has ended holds nothing any more."""
        begin = row * MOST_USERS * NUMBER_BYTES
        self._map[begin : begin + MOST_USERS * NUMBER_BYTES] = bytes(MOST_USERS * NUMBER_BYTES)

    def close(self) -> None:
        """Unmap the memory. Twice is fine."""
        self._numbers.release()
        self._map.close()
