"""A client's lane whose device's memory is mapped allocation by allocation, as that of a GPU.

What stays true: allocations are offered, noted as mapped or refused, and offered to another daemon
by the code of the cuda lane. There is no staging area until it is made.

It goes with a daemon that has a `MappingLane`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storm_client.errors import UsageError
from storm_client.lanes import Mapped, Request, Slot, StagingArea
from storm_client.lanes.offers import Mappable
from storm_client.lanes.segments import Segments
from storm_kernels.errors import CudaDriverError
from support.in_place_lane import FakeInPlace, InPlaceCpuLane

from stormd.protocol import Welcome

ALLOCATION = 4 << 20


class Driver:
    """Tells of a lane's memory: the staging area is one allocation, those of tensors follow."""

    def __init__(self, lane: InPlaceCpuLane) -> None:
        self._lane = lane

    def allocation(self, address: int) -> tuple[int, int]:
        lane = self._lane
        begin = lane.address(Slot(0, 0))
        offset, half = address - begin, lane.half_bytes
        if not 0 <= offset < lane.area_bytes:
            raise CudaDriverError("cuPointerGetAttribute", "CUDA_ERROR_INVALID_VALUE", "")
        if offset < half:
            return begin, half
        return begin + half + (offset - half) // ALLOCATION * ALLOCATION, ALLOCATION

    def buffer_id(self, address: int) -> int:
        return self.allocation(address)[0]

    def exportable(self, address: int) -> bool:
        return True

    def ipc_handle(self, address: int) -> bytes:
        return b"%d" % (address - self._lane.address(Slot(0, 0)))


class MappingCpuLane(InPlaceCpuLane):
    """An InPlaceCpuLane that has no staging area until it is made."""

    in_place: MappingInPlace | None = None

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        super().attach(welcome, descriptors, request)
        self.staging_bytes = 0
        self.in_place = MappingInPlace(self)

    def stage(self, source: Any, begin: int, slot: Slot) -> None:
        assert self.in_place is not None
        assert self.in_place.made == 1
        super().stage(source, begin, slot)


class MappingInPlace(FakeInPlace):
    """Gives what lies elsewhere a place in the device's memory when it is looked for."""

    def __init__(self, lane: MappingCpuLane) -> None:
        super().__init__(lane)
        self.segments = Segments(Driver(lane))  # type: ignore[arg-type]  # it has no pieces
        self.made = 0
        self.makes_room: Callable[[], None] = lambda: None
        """Called where the device's memory is asked for; it may raise."""
        self.interrupts_made: Callable[[], None] = lambda: None
        """Called once the staging area is made."""
        self._sources: dict[tuple[int, int], Slot] = {}

    def find(self, address: int, nbytes: int) -> Mapped | None:
        place = self._place(address, nbytes)
        found = None if place is None else self.segments.find(place, nbytes)
        if found is None or found.segment == 0:
            return found
        if place == address:
            self.came_back += 1
            self._whole = []
            self._unread.read_all()
        else:
            self.found += 1
            self._whole.append((address, self._sources.pop((address, nbytes))))
        return found

    def awaits_answer(self, address: int, nbytes: int) -> bool:
        place = self._place(address, nbytes)
        return place is not None and self.segments.awaits_answer(place, nbytes)

    def make_staging(self) -> StagingArea:
        if not self.made:
            self.makes_room()
            self.made += 1
            self.interrupts_made()
        return StagingArea(self._lane.address(Slot(0, 0)), self._lane.half_bytes)

    def offer_staging(self, address: int) -> None:
        self.segments.offer_staging(address)

    def offers(self) -> list[Mappable]:
        return self.segments.offers()

    @property
    def last_number(self) -> int:
        return self._unread.last

    def restore_status(self, ticket: int) -> int | None:
        return None  # of what is restored in place nothing is under way when a test ends a daemon

    def _place(self, address: int, nbytes: int) -> int | None:
        """Return where memory lies on the device; None if it has no place there."""
        if 0 <= address - self._lane.address(Slot(0, 0)) < self._lane.area_bytes:
            return address
        slot = self._sources.get((address, nbytes)) or self._lane.reserve(nbytes)
        if slot is None:
            return None
        self._sources[address, nbytes] = slot
        return self._lane.address(slot)


def no_memory() -> None:
    raise UsageError("no staging area: CUDA_ERROR_OUT_OF_MEMORY")
