"""Memory that two processes map: a sealed memfd.

Its size cannot change after creation, so a client cannot make the daemon fault by truncating it
during a copy. It has no name, so others cannot open it, and a crash leaves nothing to clean up. It
exists for as long as some process has it open or mapped, whichever process made it.
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
    """Ask for huge pages; a kernel without them, such as a real-time one, calls that invalid."""
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def sealed_memory(name: str, nbytes: int) -> int:
    """Return the descriptor of `nbytes` of zeroed memory whose size can never change.

    Raises:
        OSError: no descriptor is left, or there is no such size.
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
    """Return whether a descriptor is of memory with exactly so many bytes, sealed at that size.

    Only such memory can be sealed: not a file that its owner could truncate or whose reads it could
    delay.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        return seals & _SEALS == _SEALS and os.fstat(descriptor).st_size == nbytes
    except OSError:
        return False


class SharedMemory:
    """`nbytes` (whole pages) of zeroed shared memory, mapped here at `address`.

    The machine allocates the pages when they are first touched. With a `descriptor`, which this
    object then owns, the memory is that of the descriptor, with its contents.

    Raises:
        OSError: no descriptor or no address space is left; or the descriptor is of something else.
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
        """Return the descriptor for the other process; only once. The caller closes it."""
        assert self._descriptor >= 0, "the descriptor has been taken"
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def discard(self) -> None:
        """Give the pages back to the machine, even while the other process maps them.

        Both sides read zeros from then on. A page that the other process touches again is charged
        to that process.
        """
        try:
            self._mapping.madvise(mmap.MADV_REMOVE)
        except OSError as error:
            log.warning("shared memory of a session stays until its client ends: %s", error)

    def close(self) -> None:
        """Unmap the memory. Nothing may use an address in it any more. Calling it twice is fine."""
        if self._descriptor >= 0:
            os.close(self.take_descriptor())
        self._mapping.close()


def _check_sealed(descriptor: int, name: str, nbytes: int) -> None:
    if not is_sealed(descriptor, nbytes):
        raise OSError(errno.EINVAL, f"{name} is no sealed memory of {nbytes} bytes")
