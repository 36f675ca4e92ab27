"""A file for the tier that fails as disks do: with an error, silently, slowly, or for good."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from random import Random

from stormd.memory.extents import PAGE

__all__ = ["FAULTS", "FailingFile", "MemoryFile"]


class MemoryFile:
    """A file in memory that keeps what it is given."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.closed = False

    def write(self, offset: int, data: memoryview) -> None:
        assert offset % PAGE == len(data) % PAGE == 0
        assert offset + len(data) <= len(self.data)
        self.data[offset : offset + len(data)] = data

    def read(self, offset: int, into: memoryview) -> None:
        assert offset % PAGE == len(into) % PAGE == 0
        assert offset + len(into) <= len(self.data)
        into[:] = self.data[offset : offset + len(into)]

    def close(self) -> None:
        self.closed = True


class FailingFile(MemoryFile):
    """One whose `chance` of a fault of these `kinds` is drawn at each call.

    `faults` counts those that there were. A disk that is gone stays so.
    """

    def __init__(
        self, nbytes: int, random: Random, chance: float, kinds: tuple[str, ...] = ()
    ) -> None:
        super().__init__(nbytes)
        self._random = random
        self._chance = chance
        self._kinds = kinds or tuple(FAULTS)
        self._lock = threading.Lock()
        self._gone = False
        self.faults = 0

    def write(self, offset: int, data: memoryview) -> None:
        fault = self._fault()
        if fault is None:
            super().write(offset, data)
        else:
            FAULTS[fault](self, offset, data, True)

    def read(self, offset: int, into: memoryview) -> None:
        fault = self._fault()
        if fault is None:
            super().read(offset, into)
        else:
            FAULTS[fault](self, offset, into, False)

    def _fault(self) -> str | None:
        with self._lock:
            if self._gone:
                return "gone"
            if self._random.random() >= self._chance:
                return None
            self.faults += 1
            return self._random.choice(self._kinds)

    # --- faults -----------------------------------------------------------------------------

    def _eio(self, _offset: int, _data: memoryview, _writes: bool) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def _full(self, offset: int, data: memoryview, writes: bool) -> None:
        if writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._eio(offset, data, writes)

    def _go(self, _offset: int, _data: memoryview, _writes: bool) -> None:
        self._gone = True
        raise OSError(errno.ENODEV, "No such device")

    def _torn(self, offset: int, data: memoryview, writes: bool) -> None:
        """Write the first pages alone, and call it done; or read only those."""
        part = len(data) // PAGE // 2 * PAGE
        self._move(offset, data[:part], writes)

    def _astray(self, offset: int, data: memoryview, writes: bool) -> None:
        """Write to, or read from, another place."""
        pages = (len(self.data) - len(data)) // PAGE
        self._move(self._random.randint(0, pages) * PAGE, data, writes)

    def _flipped(self, offset: int, data: memoryview, writes: bool) -> None:
        """Change one bit on the way."""
        changed = memoryview(bytearray(data))
        if not writes:
            self._move(offset, changed, writes)
        where = self._random.randrange(len(changed))
        changed[where] ^= 1 << self._random.randrange(8)
        if writes:
            self._move(offset, changed, writes)
        else:
            data[:] = changed

    def _nothing(self, _offset: int, _data: memoryview, _writes: bool) -> None:
        """Call it done."""

    def _move(self, offset: int, data: memoryview, writes: bool) -> None:
        if writes:
            MemoryFile.write(self, offset, data)
        else:
            MemoryFile.read(self, offset, data)


Fault = Callable[[FailingFile, int, memoryview, bool], None]

FAULTS: dict[str, Fault] = {
    "eio": FailingFile._eio,
    "full": FailingFile._full,
    "gone": FailingFile._go,
    "torn": FailingFile._torn,
    "astray": FailingFile._astray,
    "flipped": FailingFile._flipped,
    "nothing": FailingFile._nothing,
}
"""By name. The last four are silent."""
