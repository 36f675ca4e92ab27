"""Memory that two processes map: a sealed memfd.

Its size cannot change after creation, so a client cannot make the daemon fault by truncating it
under a copy, and it has no name, so there is nothing to open for others and nothing to clean up
after a crash. It lives for as long as somebody has it open or mapped, whoever made it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from contextlib import suppress
from typing import Final

__all__ = ["SharedMemory", "advise_huge_pages", "is_sealed", "sealed_memory"]

log = logging.getLogger(__name__)

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for huge pages; a kernel without them, as real-time ones, calls that invalid."""
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def sealed_memory(name: str, nbytes: int) -> int:
    """Return the descriptor of `nbytes` of zeroed memory whose size is for good.

    Raises:
        OSError: no descriptor left, or no such size.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int, nbytes: int) -> bool:
    """Tell whether a descriptor is that of memory with exactly so many bytes, for good.

    Nothing else can be sealed: no file that its owner could cut short, or hold up reads of.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        return seals & _SEALS == _SEALS and os.fstat(descriptor).st_size == nbytes
    except OSError:
        return False


class SharedMemory:
    """`nbytes` (whole pages) of zeroed shared memory, mapped here at `address`.

    Its pages are taken from the machine when they are first touched. With a `descriptor`, which is
    this object's from then on, it is that memory, as it is.

    Raises:
        OSError: no descriptor or no address space left; or the descriptor is of something else.
    """

    def __init__(self, name: str, nbytes: int, descriptor: int = -1) -> None:
        self.nbytes: Final = nbytes
        if descriptor < 0:
            self._descriptor = sealed_memory(name, nbytes)
        else:
            self._descriptor = descriptor
        try:
            _check_sealed(self._descriptor, name, nbytes)
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


def _check_sealed(descriptor: int, name: str, nbytes: int) -> None:
    if not is_sealed(descriptor, nbytes):
        raise OSError(errno.EINVAL, f"{name} is no sealed memory of {nbytes} bytes")
