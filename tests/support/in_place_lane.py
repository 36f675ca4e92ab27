"""A cpu lane that claims to store in place, and reads as late as a device may.

What is "mapped" is a range of the staging area, into which a source is copied when the client has
its stream wait for that, when it asks for something back, or when nobody has anything else to do.
Until then a source that is let go can be freed, and what is freed is overwritten.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from storm_client.lanes import Mapped, Request, Slot, StagingArea
from storm_client.lanes.cpu import CpuLane
from storm_client.lanes.segments import Segments
from storm_client.transport.staging_space import ALIGNMENT, StagingSpace
from support.waiting import wait_until

from stormd.protocol import ReserveRange, Welcome
from stormd.protocol.timeline import PAGE_BYTES, PUBLISHED, Timelines, restored_slot

OVERWRITTEN = 0xA5
"""What freed memory is filled with, and what is read where there is no memory any more."""

M_PERTURB = -6  # of glibc's malloc.h


@contextmanager
def freed_memory_is_overwritten() -> Iterator[None]:
    """Have malloc fill what is freed; what it gives back to the kernel cannot be read at all."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_PERTURB, OVERWRITTEN)
    try:
        yield
    finally:
        libc.mallopt(M_PERTURB, 0)


class _Source(NamedTuple):
    """Bytes that are to be read under a number."""

    sequence: int
    address: int
    target: int
    nbytes: int


class Unread:
    """The numbers of one lane, and what has not been read under them; for any thread."""

    def __init__(self, descriptor: int) -> None:
        self._numbers = count(1)
        self.last = 0
        self._lock = threading.Lock()  # protects the page and the sources
        self._page: mmap.mmap | None = mmap.mmap(descriptor, PAGE_BYTES)
        self._sources: deque[_Source] = deque()

    def next_number(self) -> int:
        self.last = next(self._numbers)
        return self.last

    def add(self, sequence: int, address: int, target: int, nbytes: int) -> None:
        """Have bytes read under a number that was drawn last."""
        with self._lock:
            self._sources.append(_Source(sequence, address, target, nbytes))

    def read_through(self, sequence: int) -> None:
        """Read all up to a number, and say so to the daemon."""
        with self._lock:
            while self._sources and self._sources[0].sequence <= sequence:
                _read(self._sources.popleft())
            if self._page is not None:
                address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
                Timelines(address).store(PUBLISHED, sequence)

    def read_all(self) -> None:
        self.read_through(self.last)

    def counter(self, offset: int) -> int | None:
        """Return what the page's counter says; None once it is unmapped."""
        with self._lock:
            if self._page is None:
                return None
            return Timelines(ctypes.addressof(ctypes.c_char.from_buffer(self._page))).read(offset)

    def raise_counter(self, offset: int, value: int) -> None:
        """Have the page's counter be as high as `value`."""
        with self._lock:
            if self._page is not None:
                address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
                Timelines(address).store(offset, value)

    def close(self) -> None:
        """Read nothing any more: where it was read to is unmapped next."""
        with self._lock:
            self._sources.clear()
            self._page = None


def _read(source: _Source) -> None:
    """Copy memory that may have been freed."""
    ctypes.memset(source.target, OVERWRITTEN, source.nbytes)
    target = (ctypes.c_char * source.nbytes).from_address(source.target)
    with Path("/proc/self/mem").open("rb", buffering=0) as memory, suppress(OSError):
        os.preadv(memory.fileno(), [target], source.address)


class InPlaceCpuLane(CpuLane):
    """Nothing is read before its stream waits for that; see `Unread`, FakeInPlace and LateCpuLane.

    The ranges of the staging area that stand for tensors are not used again, so a test may store
    as much as the area holds. What is restored is allocated there, so the daemon writes to it.
    """

    in_place: FakeInPlace | None = None
    budget_bytes = 2 << 20
    unread: Unread
    area_bytes: int
    half_bytes: int
    """The size of the staging area; the rest stands for the device's memory."""
    part_bytes: int

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        super().attach(welcome, descriptors, request)
        self.area_bytes = welcome.staging_bytes
        self.staging_bytes = self.half_bytes = welcome.staging_bytes // 2
        self._memory = StagingSpace(welcome.staging_bytes - self.half_bytes)
        self._taken: list[Slot] = []
        self.unread = Unread(descriptors[0])
        self.part_bytes = welcome.part_bytes - welcome.part_bytes % ALIGNMENT
        self.in_place = FakeInPlace(self)

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a range of the area's other half, which stands for the device's memory."""
        taken = self._memory.allocate(nbytes)
        if taken is None:
            self.unread.read_all()  # whoever waits for room gives the device the time
            return None
        self._taken.append(taken)
        return Slot(self.half_bytes + taken.offset, nbytes)

    def publish(self) -> int:
        self.unread.read_all()
        return super().publish()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        slot = self.reserve(nbytes)
        if slot is None:
            return super().allocate(nbytes)
        # A storage of its own, as PyTorch's allocator gives: not a view of the whole area.
        memory = (ctypes.c_char * nbytes).from_address(self.address(slot))
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def address(self, slot: Slot) -> int:
        return self._mapped().area + slot.offset

    def close(self) -> None:
        self.unread.close()
        super().close()


class WithArea:
    """Has a staging area from the beginning, and unmaps nothing."""

    def awaits_answer(self, address: int, nbytes: int) -> bool:
        return False

    def make_staging(self) -> StagingArea:
        raise AssertionError("there is a staging area")

    def offer_staging(self, address: int) -> None:
        raise AssertionError("there is a staging area")

    def sweep(self) -> bool:
        return False

    def barrier(self) -> ReserveRange:
        raise AssertionError("nothing was unmapped")


class FakeInPlace(WithArea):
    """Reads what is waited for, and all up to `read`, which a test sets.

    While it stands still it does not say so.
    """

    waits_on_device = True

    def __init__(self, lane: InPlaceCpuLane) -> None:
        self.read = 0
        self.stands_still = False
        self.overtaken: list[int] = []
        self._unread = lane.unread
        self.segments = Segments(None)
        self.spare = 0
        self.found = 0
        self.came_back = 0
        self.handed_out = 0
        self._lane = lane
        self._whole: list[tuple[int, Slot]] = []
        """What was found, with its address, until the numbers of its parts are drawn."""

    def is_read(self, sequence: int) -> bool:
        if sequence <= self.read:
            self._unread.read_through(sequence)
            return True
        return sequence in self.overtaken and not self.stands_still

    def wait_before_reuse(self, sequence: int, source: torch.UntypedStorage) -> None:
        self.overtaken.append(sequence)
        self._unread.read_through(sequence)  # the host's memory is nobody else's before that

    def find(self, address: int, nbytes: int) -> Mapped | None:
        offset = address - self._lane._mapped().area
        if 0 <= offset < self._lane.area_bytes:
            self.came_back += 1
            self._whole = []
            self._unread.read_all()  # what is asked for cannot be had before
            return Mapped(0, offset)
        slot = self._lane.reserve(nbytes)
        if slot is None:
            return None
        self._whole.append((address, slot))
        self.found += 1
        return Mapped(0, slot.offset)

    def publish_numbers(self, count: int) -> range:
        numbers = [self._unread.next_number() for _ in range(count)]
        self._add_parts(numbers, self._whole[-count:])
        self._whole = []
        return range(numbers[0], numbers[-1] + 1)

    def await_restored(self, tickets: Sequence[int]) -> None:
        """Wait here: what a CPU does next reads the memory at once."""
        self.handed_out += len(tickets)
        for ticket in tickets:
            slot = restored_slot(ticket)
            wait_until(lambda slot=slot, ticket=ticket: self._is_there(slot, ticket))

    def end_waits(self, ticket: int) -> None:
        self._unread.raise_counter(restored_slot(ticket), ticket)

    def _is_there(self, slot: int, ticket: int) -> bool:
        value = self._unread.counter(slot)
        return value is None or value >= ticket

    def headroom(self) -> int:
        return self.spare

    def _add_parts(self, numbers: list[int], found: list[tuple[int, Slot]]) -> None:
        size = self._lane.part_bytes
        parts = [
            (address + begin, self._lane.address(slot) + begin, min(size, slot.nbytes - begin))
            for address, slot in found
            for begin in range(0, slot.nbytes, size)
        ]
        # What was found before these was not sent.
        for sequence, part in zip(numbers, parts[-len(numbers) :], strict=bool(parts)):
            self._unread.add(sequence, *part)
