"""Memory that the daemon and one client both map: a sealed memfd.

Its size cannot change after creation, so a client cannot make the daemon fault by truncating it
under a copy, and it has no name, so there is nothing to open for others and nothing to clean up
after a crash.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
from typing import Final

from stormd.memory.huge_pages import advise_huge_pages

__all__ = ["SharedMemory"]

log = logging.getLogger(__name__)

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """`nbytes` (whole pages) of zeroed shared memory, mapped here at `address`.

    Its pages are taken from the machine when they are first touched.

    Raises:
        OSError: no descriptor or no address space left.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, nbytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._mapping = mmap.mmap(self._descriptor, nbytes)
        except OSError:
            os.close(self._descriptor)
            raise
        advise_huge_pages(self._mapping)
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def take_descriptor(self) -> int:
        """Return the descriptor that the other process maps, once; the caller closes it."""
        assert self._descriptor >= 0, "the descriptor has been taken"
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def discard(self) -> None:
        """Give the pages back to the machine, also where the other process keeps them mapped.

        Each side reads zeros from then on. A page that the other process touches again is charged
        to that one.
        """
        try:
            self._mapping.madvise(mmap.MADV_REMOVE)
        except OSError as error:
            log.warning("shared memory of a session stays until its client ends: %s", error)

    def close(self) -> None:
        """Unmap. Nothing may use an address in it any more. Twice is fine."""
        if self._descriptor >= 0:
            os.close(self.take_descriptor())
        self._mapping.close()
