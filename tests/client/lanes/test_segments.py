"""Which allocations the daemon has mapped: by buffer id, told once, forgotten when freed."""

from __future__ import annotations

from itertools import count

import pytest
from storm_client.lanes import STAGING, Mapped
from storm_client.lanes.segments import Segments
from storm_client.transport.connection import send_offers
from storm_kernels.errors import CudaDriverError

from stormd.protocol import Envelope, MapSegment, Message, UnmapSegment

MIB = 1 << 20


class Device:
    """Allocations by address; each gets an id of its own."""

    def __init__(self) -> None:
        self.allocations: dict[int, tuple[int, int]] = {}
        self.exports = True
        self.is_imported = False
        self._ids = 0

    def allocate(self, base: int, nbytes: int = MIB) -> None:
        self._ids += 1
        self.allocations[base] = (self._ids, nbytes)

    def _at(self, address: int) -> tuple[int, int, int]:
        for base, (number, nbytes) in self.allocations.items():
            if base <= address < base + nbytes:
                return number, base, nbytes
        raise CudaDriverError("cuPointerGetAttribute", "CUDA_ERROR_INVALID_VALUE", "")

    def buffer_id(self, address: int) -> int:
        return self._at(address)[0]

    def allocation(self, address: int) -> tuple[int, int]:
        return self._at(address)[1:]

    def exportable(self, address: int) -> bool:
        return self.exports

    def retain_piece(self, address: int) -> int | None:
        return None

    def ipc_handle(self, address: int) -> bytes:
        if self.is_imported:
            raise CudaDriverError("cuIpcGetMemHandle", "CUDA_ERROR_INVALID_VALUE", "")
        return b"%d" % self._at(address)[0]


class Daemon:
    """Keeps what was posted; requests are numbered from 1 on."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.numbers = count(1)
        self.outbox: list[Envelope] = []
        self._posted: list[Message] = []

    def defer(self, request: int, message: Message) -> None:
        self._posted.append(message)
        assert len(self._posted) == request

    def flush_soon(self) -> None:
        while self.outbox:
            self.defer(*self.outbox.pop(0))

    def send_descriptor(self, number: int, descriptor: int) -> bool:
        raise AssertionError("there are no pieces")

    @property
    def posted(self) -> list[Message]:
        send_offers(self, self.segments)
        return self._posted

    def answer(self, *, mapped: bool = True) -> None:
        assert self.segments.is_pending(len(self.posted))
        self.segments.on_answer(len(self.posted), None if mapped else "no such handle")


@pytest.fixture
def device() -> Device:
    device = Device()
    device.allocate(MIB)
    return device


@pytest.fixture
def segments(device: Device) -> Segments:
    return Segments(device, known=3)


@pytest.fixture
def daemon(segments: Segments) -> Daemon:
    return Daemon(segments)


def test_a_range_is_found_from_the_daemons_answer_on(segments: Segments, daemon: Daemon) -> None:
    assert segments.find(MIB + 64, 64) is None
    assert segments.find(MIB + 64, 64) is None
    assert daemon.posted == [MapSegment(segment=1, handle=b"1", nbytes=MIB)]
    daemon.answer()
    assert segments.find(MIB + 64, 64) == Mapped(1, 64)
    assert len(daemon.posted) == 1


def test_an_address_used_again_is_another_allocation(
    device: Device, segments: Segments, daemon: Daemon
) -> None:
    segments.find(MIB, 64)
    daemon.answer()
    device.allocate(MIB)
    assert segments.find(MIB, 64) is None
    daemon.answer()
    assert segments.find(MIB, 64) == Mapped(2, 0)
    assert segments.sweep()
    assert daemon.posted[-1] == UnmapSegment(1)
    assert segments.find(MIB, 64) == Mapped(2, 0)


def test_the_one_used_longest_ago_gives_way(
    device: Device, segments: Segments, daemon: Daemon
) -> None:
    for number in (1, 2, 3):
        device.allocate(number * MIB)
        segments.find(number * MIB, 64)
        daemon.answer()
    segments.find(MIB, 64)
    device.allocate(4 * MIB)
    segments.find(4 * MIB, 64)
    assert daemon.posted[-2] == UnmapSegment(2)  # before it is offered more
    assert segments.find(MIB, 64) is not None
    assert len(segments) == 3


def test_memory_whose_export_fails_is_left_alone(
    device: Device, segments: Segments, daemon: Daemon
) -> None:
    device.is_imported = True
    assert segments.find(MIB, 64) is None
    assert segments.find(MIB + 64, 64) is None
    assert not daemon.posted
    assert not segments.sweep()
    assert len(segments) == 1
    del device.allocations[MIB]
    assert not segments.sweep()
    assert len(segments) == 0


def test_another_daemon_is_offered_what_was_mapped_or_on_offer() -> None:
    device = Device()
    segments = Segments(device)
    daemon = Daemon(segments)
    for base in (10 * MIB, 20 * MIB, 30 * MIB, 40 * MIB):
        device.allocate(base)
    for base, mapped in ((10 * MIB, True), (20 * MIB, False)):
        segments.find(base, 64)
        daemon.answer(mapped=mapped)
    segments.find(30 * MIB, 64)  # on offer
    assert daemon.posted
    offers = {offer.segment for offer in segments.offers()}
    assert offers == {1, 3}
    segments.find(40 * MIB, 64)  # met while another daemon was looked for
    segments.resume(offers, {3})
    assert segments.find(30 * MIB, 64) == Mapped(3, 0)
    assert segments.find(10 * MIB, 64) is None
    assert [type(one) for one in segments.outbox] == [MapSegment]
    daemon.answer()
    assert segments.find(40 * MIB, 64) == Mapped(4, 0)


def test_an_answer_is_awaited_from_the_offer_on(
    device: Device, segments: Segments, daemon: Daemon
) -> None:
    assert not segments.awaits_answer(MIB, 64)
    segments.find(MIB, 64)
    assert segments.awaits_answer(MIB + 64, 64)
    assert daemon.posted
    assert segments.awaits_answer(MIB, 64)
    daemon.answer(mapped=False)
    assert not segments.awaits_answer(MIB, 64)
    assert not segments.awaits_answer(5 * MIB, 64)  # where there is no memory


def test_an_offer_that_an_interrupt_stops_is_sent_once(
    device: Device, segments: Segments, daemon: Daemon
) -> None:
    """The interrupt comes when the offer has been returned, or when it has been posted."""
    segments.find(MIB, 64)
    assert segments.next_offer(daemon.send_descriptor) is not None
    assert segments.awaits_answer(MIB, 64)
    segments.post(next(daemon.numbers), segments.outbox[0], daemon.outbox)
    assert segments.awaits_answer(MIB, 64)
    daemon.flush_soon()
    daemon.answer()
    assert segments.find(MIB, 64) == Mapped(1, 0)
    assert len(daemon.posted) == 1


def test_the_staging_area_is_offered_once_and_stays(
    device: Device, segments: Segments, daemon: Daemon
) -> None:
    for _ in range(2):
        segments.offer_staging(MIB)
    assert [one.segment for one in daemon.posted] == [STAGING]
    assert segments.awaits_answer(MIB, MIB)
    daemon.answer()
    assert segments.find(MIB, MIB) == Mapped(STAGING, 0)
    for number in range(2, 6):
        device.allocate(number * MIB)
        segments.find(number * MIB, 64)
        daemon.answer()
    assert segments.find(MIB, MIB) == Mapped(STAGING, 0)
    assert not segments.sweep()
    assert UnmapSegment(STAGING) not in daemon.posted


@pytest.mark.parametrize("is_answered", [True, False])
def test_another_daemon_is_offered_the_staging_area(
    is_answered: bool, device: Device, segments: Segments, daemon: Daemon
) -> None:
    assert segments.offers() == []
    segments.offer_staging(MIB)
    assert daemon.posted
    if is_answered:
        daemon.answer()
    assert [one.segment for one in segments.offers()] == [STAGING]
    segments.resume({STAGING}, {STAGING})
    assert segments.find(MIB, MIB) == Mapped(STAGING, 0)
    assert not segments.outbox
