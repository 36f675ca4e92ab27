"""Limits on what all worker processes hold together: numbers in memory that they share.

Every number has one writer: a worker writes its own row, and reads all. A worker that wants more
first writes what it would hold then, and only afterwards reads what the others hold. If two do so
at once, at least one sees the other, so together they never hold more than they may. No worker
waits for another. The row of a worker that was killed is cleared by the front.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Final

__all__ = ["MAX_USERS", "PoolBudget", "Rows", "UserTotals"]

MAX_USERS: Final = 1 << 16
"""Most users that may have a number: as many as there may be sessions."""

COMMITTED: Final = MAX_USERS
BUSY: Final = MAX_USERS + 1
WANTED: Final = MAX_USERS + 2
COLUMNS: Final = MAX_USERS + 3
"""A row's columns: what each user holds, then the pool's memory, whether there is a session, and
whether more memory was asked for in vain."""

NUMBER_BYTES: Final = 8


class Rows:
    """The numbers of `workers` processes, of which row `own` belongs to this process.

    `descriptor` is that of memory made by `make`; the caller keeps it.
    """

    def __init__(self, descriptor: int, workers: int, own: int) -> None:
        self._map = mmap.mmap(descriptor, workers * COLUMNS * NUMBER_BYTES)
        self._numbers = memoryview(self._map).cast("q")
        self._others = [row * COLUMNS for row in range(workers) if row != own]
        self._own = own * COLUMNS
        # Releasing and acquiring the lock orders a write before the reads that follow, on every
        # CPU: others can see this process's write before it reads theirs.
        self._fence = threading.Lock()
        self._fence.acquire()

    @staticmethod
    def make(workers: int) -> int:
        """Return the descriptor of such memory, filled with zeros."""
        descriptor = os.memfd_create("stormd-workers", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, workers * COLUMNS * NUMBER_BYTES)
        return descriptor

    def write(self, column: int, value: int) -> None:
        """Write a number of this process's row; later reads are ordered after the write."""
        self._numbers[self._own + column] = value
        self._fence.release()
        self._fence.acquire()

    def others(self, column: int) -> list[int]:
        """Return the numbers of the other processes in a column, in the order of their rows."""
        return [self._numbers[row + column] for row in self._others]

    def clear(self, row: int) -> None:
        """Note that a worker that has ended holds nothing any more."""
        begin, nbytes = row * COLUMNS * NUMBER_BYTES, COLUMNS * NUMBER_BYTES
        self._map[begin : begin + nbytes] = bytes(nbytes)

    def close(self) -> None:
        """Unmap the memory. Calling it twice is fine."""
        self._numbers.release()
        self._map.close()


class UserTotals:
    """The bytes of the pool that each user holds, here and in the other processes."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._columns: dict[int, int] = {}

    def set_column(self, uid: int, column: int) -> None:
        """Note a user's column: the front sends it before it hands over a session of that user."""
        self._columns[uid] = column

    def hold(self, uid: int, nbytes: int) -> None:
        """Note how many bytes a user holds in this process."""
        self._rows.write(self._columns[uid], nbytes)

    def claim(self, uid: int, nbytes: int) -> int:
        """Note that a user wants to hold so much here; return what it holds in the other processes.

        If the sum is too much, the caller must call `hold` with what the user does hold.
        """
        self.hold(uid, nbytes)
        return sum(self._rows.others(self._columns[uid]))


class PoolBudget:
    """How much of a pool of `total` bytes this process may have; its part grows and shrinks.

    Each worker has an equal `share`. Memory that workers without a session do not use may be lent
    to workers with one, except for the `first` bytes with which each worker begins. It is returned
    once it is free and its owner wants it. For the event loop alone.
    """

    def __init__(self, rows: Rows, workers: int, total: int, first: int) -> None:
        self._rows = rows
        self._total = total
        self.share: Final = total // workers
        self.first: Final = min(first, self.share // mmap.PAGESIZE * mmap.PAGESIZE)
        self.held = 0
        """Bytes that are claimed and not given back."""
        self._is_busy = False

    @property
    def surplus(self) -> int:
        """The bytes that this process holds beyond its right if others want memory; else 0."""
        if not any(self._rows.others(WANTED)):
            return 0
        return max(0, self.held - (self.share if self._is_busy else self.first))

    def claim(self, nbytes: int) -> int:
        """Take so much more, or as much as there is; return it. Others can see if it was less."""
        self._rows.write(COMMITTED, self.held + nbytes)
        granted = min(nbytes, self._room() // mmap.PAGESIZE * mmap.PAGESIZE)
        self.held += granted
        self._rows.write(COMMITTED, self.held)
        self._rows.write(WANTED, granted < nbytes)
        return granted

    def give_back(self, nbytes: int) -> None:
        """Release bytes to the others that are no memory of this process any more."""
        self.held -= nbytes
        self._rows.write(COMMITTED, self.held)

    def set_has_session(self, *, is_busy: bool) -> None:
        """Set whether there is a session, for which this worker's share is kept."""
        self._is_busy = is_busy
        self._rows.write(BUSY, is_busy)
        if not is_busy:
            self._rows.write(WANTED, 0)

    def _room(self) -> int:
        """Return how much more it may take: of its share, and of what others have no right to."""
        others, busy = self._rows.others(COMMITTED), self._rows.others(BUSY)
        rights = (self.share if is_busy else self.first for is_busy in busy)
        kept = sum(max(0, right - held) for right, held in zip(rights, others, strict=True))
        free = self._total - sum(others)
        return max(0, max(min(self.share, free), free - kept) - self.held)
