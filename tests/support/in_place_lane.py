"""A cpu lane that claims to store in place: what is "mapped" is a copy in the staging area."""

from __future__ import annotations

import ctypes
from ctypes import memmove
from itertools import count

import torch
from storm_client.lanes import Mapped, Request, Slot
from storm_client.lanes.cpu import CpuLane
from storm_client.lanes.segments import Segments
from storm_client.staging import StagingSpace

from stormd.protocol import MapSegment, Welcome


class FakeReader:
    """Reads all up to `read`, which a test sets, and what is waited for, unless it stands still."""

    waits_on_device = True

    def __init__(self) -> None:
        self.read = 0
        self.stands_still = False
        self.overtaken: list[int] = []
        self._numbers = count(1)

    def is_read(self, sequence: int) -> bool:
        return sequence <= self.read or (sequence in self.overtaken and not self.stands_still)

    def overtake(self, sequence: int, source: torch.UntypedStorage) -> None:
        self.overtaken.append(sequence)

    def next_number(self) -> int:
        return next(self._numbers)


class InPlaceCpuLane(CpuLane):
    """Nothing counts as read before its stream waits for that, or a test sets `in_place.read`.

    The ranges of the staging area that stand for tensors are not used again, so a test may store
    as much as the area holds. What is restored is allocated there, so the daemon writes to it.
    """

    in_place: FakeInPlace | None = None
    budget_bytes = 2 << 20

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        super().attach(welcome, descriptors, request)
        self.staging_bytes = welcome.staging_bytes // 2
        self._memory = StagingSpace(welcome.staging_bytes - self.staging_bytes)
        self.in_place = FakeInPlace(self)

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a range of the area's other half, which stands for the device's memory."""
        offset = self._memory.allocate(nbytes)
        return None if offset is None else Slot(self.staging_bytes + offset, nbytes)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        slot = self.reserve(nbytes)
        if slot is None:
            return super().allocate(nbytes)
        # A storage of its own, as PyTorch's allocator gives: not a view of the whole area.
        memory = (ctypes.c_char * nbytes).from_address(self.address(slot))
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def address(self, slot: Slot) -> int:
        return self._mapped().data_ptr() + slot.offset


class FakeInPlace(FakeReader):
    def __init__(self, lane: InPlaceCpuLane) -> None:
        super().__init__()
        self.segments = Segments(None)
        self.maps_new_memory = True
        self.spare = 0
        self.found = 0
        self.came_back = 0
        self._lane = lane

    def find(self, address: int, nbytes: int) -> Mapped | None:
        area = self._lane._mapped()
        offset = address - area.data_ptr()
        if 0 <= offset < area.numel():
            self.came_back += 1
            return Mapped(0, offset)
        slot = self._lane.reserve(nbytes)
        if slot is None:
            return None
        memmove(self._lane.address(slot), address, nbytes)
        self.found += 1
        return Mapped(0, slot.offset)

    def sweep(self) -> bool:
        return False

    def barrier(self) -> MapSegment:
        raise AssertionError("nothing was unmapped")

    def produced(self, count: int) -> range:
        numbers = [self.next_number() for _ in range(count)]
        return range(numbers[0], numbers[-1] + 1)

    def headroom(self) -> int:
        return self.spare
