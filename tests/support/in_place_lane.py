"""A cpu lane that claims to store in place: what is "mapped" is a copy in the staging area."""

from __future__ import annotations

import ctypes
from ctypes import memmove

import torch
from storm_client.lanes import Request, Slot
from storm_client.lanes.cpu import CpuLane
from storm_client.lanes.segments import Segments

from stormd.protocol import MapSegment, Welcome


class InPlaceCpuLane(CpuLane):
    """Nothing counts as read before a test sets `read`.

    The ranges of the staging area that stand for tensors are not used again, so a test may store
    as much as the area holds. What is restored is allocated there, so the daemon writes to it.
    """

    in_place: FakeInPlace | None = None

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        super().attach(welcome, descriptors, request)
        self.in_place = FakeInPlace(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        slot = self.reserve(nbytes)
        if slot is None:
            return super().allocate(nbytes)
        # A storage of its own, as PyTorch's allocator gives: not a view of the whole area.
        memory = (ctypes.c_char * nbytes).from_address(self.address(slot))
        return torch.frombuffer(memory, dtype=torch.uint8)

    def address(self, slot: Slot) -> int:
        return self._mapped().data_ptr() + slot.offset


class FakeInPlace:
    def __init__(self, lane: InPlaceCpuLane) -> None:
        self.segments = Segments(None)
        self.budget_bytes = 2 << 20
        self.waits_on_device = True
        self.maps_new_memory = True
        self.spare = 0
        self.found = 0
        self.came_back = 0
        self.read = -1  # the cpu lane's sequence numbers are all 0
        self.overtaken: list[int] = []
        self._lane = lane

    def find(self, address: int, nbytes: int) -> Slot | None:
        offset = address - self._lane._mapped().data_ptr()
        if 0 <= offset < self._lane.staging_bytes:
            self.came_back += 1
            return Slot(0, offset, nbytes)
        slot = self._lane.reserve(nbytes)
        if slot is not None:
            memmove(self._lane.address(slot), address, nbytes)
            self.found += 1
        return slot

    def sweep(self) -> bool:
        return False

    def barrier(self) -> MapSegment:
        raise AssertionError("nothing was unmapped")

    def produced(self, count: int) -> range:
        return range(count)

    def headroom(self) -> int:
        return self.spare

    def is_read(self, sequence: int) -> bool:
        return sequence <= self.read

    def overtake(self, sequence: int, source: torch.UntypedStorage) -> None:
        self.overtaken.append(sequence)
