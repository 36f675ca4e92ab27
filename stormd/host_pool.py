"""The pool's memory: one mapping, made resident at start and locked where that is allowed.

The mapping belongs to this process alone. No session ever maps it or is handed a part of it, so a
freed block is readable by nobody, and it does not move until `close`.

Private anonymous memory rather than shared: nothing outside may map it, and transparent huge
pages follow the machine's ordinary setting instead of the seldom enabled one for shared memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from stormd.errors import PoolUnavailable, StartStopped
from stormd.huge_pages import advise_huge_pages
from stormd.machine import memory_available
from stormd.sizes import format_size

__all__ = ["HostPool"]

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 64 << 20
"""Bytes touched by one call: small enough for a progress bar, a multiple of any huge page."""

MAX_TOUCHERS: Final = 8
"""Threads that touch; more do not clear memory faster on the machines that were measured."""

BYTES_A_TABLE_BYTE: Final = 512
"""The kernel's table of a process's pages takes eight bytes for each page of 4 KiB."""

MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; the mmap module does not name it yet."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class HostPool:
    """`nbytes` of host memory at `address`, resident from construction on.

    `on_progress(done, total)` is called from several threads, one call at a time, in bytes.
    `is_stopped` is asked between chunks, from any of them: a large pool takes a minute to touch,
    and whoever is to end must not wait for it. `beside` are the bytes that the process needs
    besides. `locked` says whether the kernel agreed never to swap it.

    Raises:
        PoolUnavailable: the machine does not have or does not give that much memory.
        StartStopped: `is_stopped` said so; the memory has been given back.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        beside: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
        is_stopped: Callable[[], bool] | None = None,
    ) -> None:
        self.nbytes: Final = nbytes
        self._kept = False
        self._is_stopped = is_stopped or _never
        _check_size(nbytes, beside)
        try:
            self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise PoolUnavailable(_refusal(nbytes, error)) from error
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        try:
            self._advise()
            self._touch(on_progress or _no_progress)
            self.locked: Final = self._lock()
        except BaseException:
            self._mapping.close()
            raise

    def pieces(self, limit: int) -> Iterator[tuple[int, int]]:
        """Yield (address, bytes) ranges of at most `limit` bytes that make up the pool.

        For what takes long with each: a driver takes no arbitrarily large range at once.
        """
        for offset in range(0, self.nbytes, limit):
            yield self.address + offset, min(limit, self.nbytes - offset)

    def check_stopped(self) -> None:
        """Give the start up where the daemon is to end: for between two pieces of it.

        Raises:
            StartStopped: it is.
        """
        if self._is_stopped():
            raise StartStopped("told to end while the pool was being made")

    def close(self) -> None:
        """Give the memory back. Nothing may use an address in it any more. Twice is fine."""
        if not self._kept:
            self._mapping.close()

    def keep(self) -> None:
        """Leave the memory mapped until the process ends: someone may still use it."""
        self._kept = True

    def _advise(self) -> None:
        advise_huge_pages(self._mapping)
        self._mapping.madvise(mmap.MADV_DONTFORK)  # a child would double it page by page
        self._mapping.madvise(mmap.MADV_DONTDUMP)  # other people's tensors, in a core file

    def _touch(self, on_progress: Callable[[int, int], None]) -> None:
        lock = threading.Lock()  # protects `done` and serialises on_progress
        done = 0

        def touch(piece: tuple[int, int]) -> None:
            nonlocal done
            self.check_stopped()
            _populate(*piece)
            with lock:
                done += piece[1]
                on_progress(done, self.nbytes)

        threads = min(MAX_TOUCHERS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, thread_name_prefix="stormd-touch") as executor:
            for _ in executor.map(touch, self.pieces(CHUNK_BYTES)):
                pass

    def _lock(self) -> bool:
        """Lock all of it, or nothing: what is locked counts against the limit of others."""
        for piece in self.pieces(CHUNK_BYTES):
            self.check_stopped()
            if _libc.mlock(*piece) != 0:
                break
        else:
            return True
        reason = os.strerror(ctypes.get_errno())
        _libc.munlock(self.address, self.nbytes)
        log.warning(
            "the pool of %s is not locked in memory and could be swapped (%s): raise "
            "LimitMEMLOCK or `ulimit -l` to at least its size",
            format_size(self.nbytes),
            reason,
        )
        return False


def _no_progress(done: int, total: int) -> None:
    """Show nothing."""


def _never() -> bool:
    return False


def _check_size(nbytes: int, beside: int) -> None:
    """Refuse what could only end in the kernel killing a process, ours or another."""
    available = memory_available()
    beside += nbytes // BYTES_A_TABLE_BYTE
    if nbytes + beside > available:
        raise PoolUnavailable(
            f"pool_bytes and cache_bytes are {format_size(nbytes)} together, and the daemon needs "
            f"{format_size(beside)} beside them; this machine or container has "
            f"{format_size(available)} of memory available: set --pool-bytes lower, or free memory"
        )


def _populate(address: int, nbytes: int) -> None:
    """Make the range resident. Older kernels have no call for it: there, write to every page."""
    if _libc.madvise(address, nbytes, MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (22, 38):  # EINVAL, ENOSYS
        raise PoolUnavailable(_refusal(nbytes, OSError(number, os.strerror(number))))
    ctypes.memset(address, 0, nbytes)


def _refusal(nbytes: int, error: OSError) -> str:
    return (
        f"the kernel gives no {format_size(nbytes)} of memory for the pool "
        f"({error.strerror}): set --pool-bytes lower, or free memory"
    )
