"""The memory of fake devices: which ranges there are, who may use them, and who uses them now.

What stays true: a range that is given up is waited for, and two uses at once of which one writes,
like a use of what is not there, are faults.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(eq=False)
class Range:
    """Addresses that may be used; `device` is None where all devices may."""

    begin: int
    nbytes: int
    device: int | None
    memory: object
    """What lies there: the same for all mappings of it."""
    users: int = 0


@dataclass(frozen=True)
class Access:
    """What a piece of work does to memory."""

    address: int
    nbytes: int
    writes: bool = False
    waits: bool = False
    """Whether it looks at a counter that others write meanwhile."""


def writes_to(*ranges: tuple[int, int]) -> list[Access]:
    """Return the accesses of what writes ranges of (address, bytes)."""
    return [Access(address, nbytes, writes=True) for address, nbytes in ranges]


class DeviceMemory:
    """All that can be used, and who uses it now. `fault` is told what must not be, by device."""

    def __init__(self, fault: Callable[[int, str], None]) -> None:
        self._fault = fault
        self._changed = threading.Condition()
        self._ranges: list[Range] = []
        self._under_way: list[tuple[object, int, int, bool]] = []

    def add(self, one: Range) -> None:
        with self._changed:
            self._ranges.append(one)

    def overlaps(self, begin: int, nbytes: int) -> bool:
        with self._changed:
            return any(
                one.begin < begin + nbytes and begin < one.begin + one.nbytes
                for one in self._ranges
            )

    def remove(self, one: Range, what: str) -> None:
        with self._changed:
            self._ranges.remove(one)
            if one.users:
                self._fault(one.device or 0, f"{what} was given up while it was used")
            while one.users:
                self._changed.wait()

    def check(self, device: int, accesses: list[Access], what: str) -> bool:
        """Tell whether the accesses are allowed; a fault where not."""
        with self._changed:
            return self._found(device, accesses, what) is not None

    @contextmanager
    def used(self, device: int, accesses: list[Access], what: str) -> Iterator[bool]:
        """Use memory for a while; False where that is a fault."""
        with self._changed:
            ranges = self._found(device, accesses, what)
            if ranges is None:
                yield False
                return
            marks = [self._mark(part, one) for part, one in ranges if not part.waits]
            for mark in marks:
                if any(_collide(mark, other) for other in self._under_way):
                    self._fault(
                        device, f"{what} uses what another stream writes or reads meanwhile"
                    )
            self._under_way += marks
            for _, one in ranges:
                one.users += 1
        try:
            yield True
        finally:
            with self._changed:
                for mark in marks:
                    self._under_way.remove(mark)
                for _, one in ranges:
                    one.users -= 1
                self._changed.notify_all()

    def _mark(self, access: Access, one: Range) -> tuple[object, int, int, bool]:
        begin = access.address - one.begin
        return one.memory, begin, begin + access.nbytes, access.writes

    def _found(
        self, device: int, accesses: list[Access], what: str
    ) -> list[tuple[Access, Range]] | None:
        """Return the accesses with what lies there, each cut where two ranges meet."""
        found: list[tuple[Access, Range]] = []
        for access in accesses:
            address, end = access.address, access.address + access.nbytes
            while address < end:
                one = self._range(device, address)
                if one is None:
                    lost = f"{access.nbytes} bytes at {access.address:#x}"
                    self._fault(device, f"{what} uses {lost}, which are not there")
                    return None
                size = min(end, one.begin + one.nbytes) - address
                found.append((replace(access, address=address, nbytes=size), one))
                address += size
        return found

    def _range(self, device: int, address: int) -> Range | None:
        for one in self._ranges:
            if one.begin <= address < one.begin + one.nbytes:
                return one if one.device in (None, device) else None
        return None


def _collide(one: tuple[object, int, int, bool], other: tuple[object, int, int, bool]) -> bool:
    return one[0] is other[0] and one[1] < other[2] and other[1] < one[2] and (one[3] or other[3])
