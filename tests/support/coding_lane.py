"""A cpu lane that claims to encode by itself, as late as a device may.

Its blobs are the bytes, which the daemon encodes.
"""

from __future__ import annotations

import torch
from storm_client.lanes import Mapped, Request, Slot
from storm_client.lanes.cpu import CpuLane
from support.in_place_lane import FakeInPlace, FakeReader, InPlaceCpuLane

from stormd.protocol import Welcome


class CodingCpuLane(InPlaceCpuLane):
    """Nothing counts as encoded before its stream waits for that, or a test sets `coder.read`."""

    coder: FakeCoder | None = None

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        super().attach(welcome, descriptors, request)
        self.coder = FakeCoder(self)
        self.in_place = Mapping(self)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        assert self.coder is not None
        return CpuLane.allocate(self, nbytes) if self.coder.able else super().allocate(nbytes)


class Mapping(FakeInPlace):
    """The daemon maps tensors only where this process cannot encode them."""

    def find(self, address: int, nbytes: int) -> Mapped | None:
        return None if self._lane.coder.able else super().find(address, nbytes)


class FakeCoder(FakeReader):
    """`results` is how many parts may be under way, `able` whether it can encode at all."""

    def __init__(self, lane: CodingCpuLane) -> None:
        super().__init__(lane.unread)
        self.results = 8
        self.able = True
        self.encoded: list[int] = []
        self.refused = 0
        self._lane = lane

    def codes(self, dtype: str, codec: str) -> bool:
        return self.able

    def room(self, nbytes: int) -> int:
        return nbytes + 256

    def encode(
        self,
        source: torch.UntypedStorage,
        part: range,
        slot: Slot,
        *,
        dtype: str,
        codec: str,
        after: int,
    ) -> tuple[int, int] | None:
        assert slot.nbytes == self.room(len(part))
        if not self.results:
            self.refused += 1
            self._unread.read_all()  # whoever waits for a result gives the device the time
            return None
        self.results -= 1
        address = source.data_ptr() + part.start
        sequence = self._unread.next_number()
        self._unread.add(sequence, address, self._lane.address(slot), len(part))
        self.encoded.append(address)
        return sequence, 0

    def take_back(self, result: int) -> None:
        self.results += 1
