"""The pool's memory: one mapping, made resident, and locked if that is allowed.

All of it is made resident at start, or only a first part, and more by `commit`. Memory that is not
resident must not be used: the machine may not have it.

No session ever maps the pool or gets a part of it, so nobody can read a freed block. The pool does
not move until `close`.

The pool is private anonymous memory unless it has to outlive the process: nothing outside may map
it, and transparent huge pages follow the machine's ordinary setting. The setting for shared memory
is seldom enabled. A pool that has to outlive the process is a memory file that somebody else keeps
open.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from stormd.errors import PoolUnavailable, StartStopped
from stormd.machine import memory_available
from stormd.memory.shared_memory import advise_huge_pages
from stormd.sizes import format_size

__all__ = ["HostPool", "gather", "scatter"]

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 64 << 20
"""Bytes touched by one call: small enough for a progress bar, and a multiple of any huge page."""

MAX_TOUCHERS: Final = 8
"""Most threads that touch memory; more do not clear it faster on the machines that were
measured."""

BYTES_A_TABLE_BYTE: Final = 512
"""Bytes of memory per byte of the kernel's page table, which has eight bytes for each page of 4
KiB."""

MAP_NORESERVE: Final = 0x4000
MADV_DONTNEED: Final = 4
MADV_REMOVE: Final = 9
MADV_POPULATE_WRITE: Final = 23
"""Constants of Linux that the mmap module does not name in every version; the last is of Linux
5.14."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class HostPool:
    """`nbytes` of address space at `address`, the first `first` bytes (all if None) resident.

    `on_progress(done, total)` is called from several threads, one call at a time, in bytes.
    `is_stopped` is called between chunks, from any of these threads: touching a large pool takes a
    minute, and a daemon that is to end must not wait for it. `beside` are the bytes that the
    process needs besides the pool. `locked` says whether the kernel agreed never to swap resident
    memory; `ranges` are the resident ranges, as offsets and bytes.

    With a `descriptor`, which the caller keeps, the memory is that file's. `kept` are the ranges of
    the file that hold data: they become resident instead of the first bytes, with their contents.

    Raises:
        PoolUnavailable: the machine does not have or does not give that much memory.
        StartStopped: `is_stopped` returned True; the memory has been given back.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        first: int | None = None,
        beside: int = 0,
        descriptor: int = -1,
        kept: Sequence[tuple[int, int]] = (),
        on_progress: Callable[[int, int], None] | None = None,
        is_stopped: Callable[[], bool] | None = None,
    ) -> None:
        self.nbytes: Final = nbytes
        self.ranges: tuple[tuple[int, int], ...] = ()
        self.locked = True
        self._is_kept_mapped = False
        self._is_stopped = is_stopped or (lambda: False)
        first = nbytes if first is None else first
        if not kept:  # otherwise the memory is allocated already
            _check_size(first, beside)
        self._mapping = _mapped(nbytes, descriptor, is_partial=first < nbytes)
        self._give_back_advice = MADV_DONTNEED if descriptor < 0 else MADV_REMOVE
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        try:
            self._advise()
            for offset, size in kept or [(0, first)]:
                self._make_resident(offset, size, on_progress or _no_progress)
        except BaseException:
            self._mapping.close()
            raise

    def commit(self, offset: int, nbytes: int, *, beside: int) -> None:
        """Make a further range resident, from the start of a page on. May take seconds.

        `beside` are bytes of the machine's memory that must be left free. One call at a time.

        Raises:
            PoolUnavailable: there is not that much memory; the range is unchanged.
            StartStopped: the daemon is to end; the range is unchanged.
        """
        _check_growth(nbytes, beside)
        try:
            self._make_resident(offset, nbytes, _no_progress)
        except BaseException:
            self.give_back(offset, nbytes)
            raise

    def give_back(self, offset: int, nbytes: int) -> None:
        """Give the memory of a range, which nobody uses, back to the machine."""
        self.ranges = tuple(one for one in self.ranges if one != (offset, nbytes))
        _libc.munlock(self.address + offset, nbytes)
        _libc.madvise(self.address + offset, nbytes, self._give_back_advice)

    def check_stopped(self) -> None:
        """Abort the start if the daemon is to end; called between its steps.

        Raises:
            StartStopped: the daemon is to end.
        """
        if self._is_stopped():
            raise StartStopped("told to end while the pool was being made")

    def close(self) -> None:
        """Give the memory back; nothing may use an address in it any more. Twice is fine."""
        if not self._is_kept_mapped:
            self._mapping.close()

    def keep_mapped(self) -> None:
        """Keep the memory mapped until the process ends: someone may still use it."""
        self._is_kept_mapped = True

    def _advise(self) -> None:
        advise_huge_pages(self._mapping)
        self._mapping.madvise(mmap.MADV_DONTFORK)  # a child would double it page by page
        self._mapping.madvise(mmap.MADV_DONTDUMP)  # other people's tensors, in a core file

    def _make_resident(
        self, offset: int, nbytes: int, on_progress: Callable[[int, int], None]
    ) -> None:
        chunks = list(_chunks(self.address + offset, nbytes))
        self._touch(chunks, nbytes, on_progress)
        self._lock(chunks)
        self.ranges += ((offset, nbytes),)

    def _touch(
        self, chunks: list[tuple[int, int]], total: int, on_progress: Callable[[int, int], None]
    ) -> None:
        lock = threading.Lock()  # protects `done` and serialises on_progress
        done = 0

        def touch(chunk: tuple[int, int]) -> None:
            nonlocal done
            self.check_stopped()
            _populate(*chunk)
            with lock:
                done += chunk[1]
                on_progress(done, total)

        threads = min(MAX_TOUCHERS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, thread_name_prefix="stormd-touch") as executor:
            for _ in executor.map(touch, chunks):
                pass

    def _lock(self, chunks: list[tuple[int, int]]) -> None:
        """Lock these chunks too, or unlock the pool: locked memory counts against others' limit."""
        if not self.locked:
            return
        for chunk in chunks:
            self.check_stopped()
            if _libc.mlock(*chunk) != 0:
                break
        else:
            return
        self.locked = False
        reason = os.strerror(ctypes.get_errno())
        _libc.munlock(self.address, self.nbytes)
        log.warning(
            "the pool of %s is not locked in memory and could be swapped (%s): raise "
            "LimitMEMLOCK or `ulimit -l` to at least its size",
            format_size(self.nbytes),
            reason,
        )


def gather(pool: int, pieces: Iterable[tuple[int, int]], target: int) -> None:
    """Copy ranges (offset, bytes) of the pool at address `pool` to `target`, end to end."""
    for offset, nbytes in pieces:
        ctypes.memmove(target, pool + offset, nbytes)
        target += nbytes


def scatter(pool: int, pieces: Iterable[tuple[int, int]], source: int) -> None:
    """Copy from `source` into those ranges: the reverse of `gather`."""
    for offset, nbytes in pieces:
        ctypes.memmove(pool + offset, source, nbytes)
        source += nbytes


def _mapped(nbytes: int, descriptor: int, *, is_partial: bool) -> mmap.mmap:
    """Return a mapping of a memory file, or of private memory; touched pages are allocated.

    If only a part of private memory is to be resident, the kernel reserves nothing for it.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (MAP_NORESERVE if is_partial else 0)
    try:
        return mmap.mmap(descriptor, nbytes, private if descriptor < 0 else mmap.MAP_SHARED)
    except (OSError, ValueError) as error:
        raise PoolUnavailable(_refusal(nbytes, error)) from error


def _chunks(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, nbytes, CHUNK_BYTES):
        yield address + offset, min(CHUNK_BYTES, nbytes - offset)


def _no_progress(done: int, total: int) -> None:
    """Show nothing."""


def _check_size(nbytes: int, beside: int) -> None:
    """Refuse a size that would end in the kernel killing a process, ours or another."""
    available = memory_available()
    beside += nbytes // BYTES_A_TABLE_BYTE
    if nbytes + beside > available:
        raise PoolUnavailable(
            f"pool_bytes and cache_bytes are {format_size(nbytes)} together, and the daemon needs "
            f"{format_size(beside)} beside them; this machine or container has "
            f"{format_size(available)} of memory available: set --pool-bytes lower, or free memory"
        )


def _check_growth(nbytes: int, beside: int) -> None:
    available = memory_available()
    if nbytes + nbytes // BYTES_A_TABLE_BYTE + beside > available:
        raise PoolUnavailable(
            f"the pool cannot grow by {format_size(nbytes)}: this machine or container has "
            f"{format_size(available)} of memory available, and {format_size(beside)} are left to "
            "others"
        )


def _populate(address: int, nbytes: int) -> None:
    """Make the range resident with its contents. Without a kernel call for it, touch all pages.

    Copying a byte onto itself writes what is there, zeros or not.
    """
    if _libc.madvise(address, nbytes, MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (22, 38):  # EINVAL, ENOSYS
        raise PoolUnavailable(_refusal(nbytes, OSError(number, os.strerror(number))))
    for at in range(address, address + nbytes, mmap.PAGESIZE):
        ctypes.memmove(at, ctypes.string_at(at, 1), 1)


def _refusal(nbytes: int, error: Exception) -> str:
    return (
        f"the kernel gives no {format_size(nbytes)} of memory for the pool "
        f"({getattr(error, 'strerror', error)}): set --pool-bytes lower, or free memory"
    )
