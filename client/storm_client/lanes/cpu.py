"""The cpu lane: tensors in host memory, staged through memory shared with the daemon.

Every copy is complete when its method returns. So program order and message order are sufficient,
and sequence numbers are always 0.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from ctypes import memmove

import torch

from storm_client.errors import ConnectionClosed, DaemonLost, DaemonUnavailable
from storm_client.lanes import Lane, LaneHello, Request, Slot
from stormd.protocol import Welcome
from stormd.protocol.timeline import PAGE_BYTES, POISON, STORED, Timelines

__all__ = ["CpuLane"]

HUGE_BYTES = 4 << 20
"""In bytes: memory for restores of at least this size uses huge pages, whose first touch takes a
fraction of the time."""

_LIBC = ctypes.CDLL(None)


class CpuLane(Lane):
    """Copies between host tensors and a memory file shared with the daemon.

    Copies are plain memmoves in the calling thread, with the GIL released. Tensor.copy_ would split
    them among torch's threads, which would compete with the daemon for the cores.
    """

    def __init__(self) -> None:
        """Describe the lane; attach gives it its memory."""
        self.device = torch.device("cpu")
        self.hello = LaneHello(device="cpu")
        self._shared: _Shared | None = None

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:  # noqa: ARG002 - no message is needed here
        """Map the staging area, the second descriptor.

        Raises:
            DaemonUnavailable: the daemon shared no staging area.
        """
        if len(descriptors) < 2:
            raise DaemonUnavailable(
                f"the daemon shared {len(descriptors)} of 2 memory files with this cpu session; "
                "look for the reason in its log"
            )
        self.staging_bytes = welcome.staging_bytes
        memory = mmap.mmap(descriptors[1], welcome.staging_bytes)
        with suppress(OSError):  # some kernels have no huge pages for shared memory: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
        page = mmap.mmap(descriptors[0], PAGE_BYTES)
        self._shared = _Shared(memory, page)

    def stage(self, source: torch.UntypedStorage, begin: int, slot: Slot) -> None:
        """Copy into the slot; the bytes are there when this returns."""
        shared = self._mapped()
        memmove(shared.area + slot.offset, source.data_ptr() + begin, slot.nbytes)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return uninitialised host memory."""
        # Not torch.empty(nbytes): with deterministic algorithms it fills the memory.
        storage = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        if nbytes >= HUGE_BYTES:
            _advise_huge_pages(storage)
        return storage

    def unstage(self, slot: Slot, destination: torch.UntypedStorage, begin: int) -> None:
        """Copy the slot's bytes to offset `begin`; they are there when this returns.

        Raises:
            DaemonLost: the daemon has ended the session meanwhile, so the slot's bytes are lost;
                the destination may contain anything.
        """
        shared = self._mapped()
        memmove(destination.data_ptr() + begin, shared.area + slot.offset, slot.nbytes)
        shared.check()

    def close(self) -> None:
        """Unmap the staging area as soon as no copy uses it."""
        self._shared = None

    def _mapped(self) -> _Shared:
        """Return the shared memory, mapped while referred to; raise if the lane is closed."""
        shared = self._shared
        if shared is None:
            raise ConnectionClosed(
                "the client was closed while a tensor was being copied; call "
                "storm_client.connect() for another"
            )
        return shared


class _Shared:
    """The memory shared with the daemon, mapped as long as this object exists."""

    def __init__(self, memory: mmap.mmap, page: mmap.mmap) -> None:
        self._mappings = memory, page
        self.area = _address(memory)
        self._timelines = Timelines(_address(page))

    def check(self) -> None:
        """Check that the bytes copied out so far were valid.

        The daemon frees the staging area's pages when it ends a session; before that it poisons its
        counter.

        Raises:
            DaemonLost: the daemon has ended the session.
        """
        if self._timelines.read(STORED) >= POISON:
            raise DaemonLost("the daemon ended this session while a tensor was in flight back")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _advise_huge_pages(memory: torch.UntypedStorage) -> None:
    """Ask for huge pages for the whole pages of `memory`; a refusal by the kernel is ignored."""
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
