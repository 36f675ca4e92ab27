"""Pieces of reserved ranges: what is found is what the daemon sees, whatever was mapped since."""

from __future__ import annotations

import ctypes
import os
import random
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from storm_client.lanes import Mapped
from storm_client.lanes.segments import Segments
from storm_client.transport.connection import send_offers
from support import fake_cuda
from support.fake_virtual_memory import AddressRange, ExpandableSegment

from stormd.protocol import Envelope, MapPiece, Message, ReserveRange, UnmapSegment

PIECE = 16 << 10


class Daemon:
    """Does what it is told in its order, and answers when it is asked to."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.numbers = count(1)
        self.outbox: list[Envelope] = []
        self.posted: list[Message] = []
        self.reads = True
        self._ranges: dict[int, AddressRange] = {}
        self._pieces: dict[int, tuple[AddressRange, int]] = {}
        self._descriptors: dict[int, int] = {}
        self._answers: deque[int] = deque()

    def flush_soon(self) -> None:
        while self.outbox:
            self.defer(*self.outbox.pop(0))

    def send_descriptor(self, number: int, descriptor: int) -> bool:
        if self.reads:
            assert number not in self._descriptors
            self._descriptors[number] = os.dup(descriptor)
        return self.reads

    def defer(self, request: int, message: Message) -> None:
        self.posted.append(message)
        if isinstance(message, UnmapSegment):
            if message.segment in self._pieces:
                into, offset = self._pieces.pop(message.segment)
                into.unmap(offset)
            else:
                gone = self._ranges.pop(message.segment)
                self._pieces = {n: at for n, at in self._pieces.items() if at[0] is not gone}
                gone.close()
            return
        if isinstance(message, ReserveRange):
            self._ranges[message.segment] = AddressRange(message.nbytes, 0)
        else:
            assert isinstance(message, MapPiece)
            descriptor = self._descriptors.pop(message.segment)
            into = self._ranges[message.into]
            into.map(descriptor, message.offset, message.nbytes)
            os.close(descriptor)
            self._pieces[message.segment] = into, message.offset
        self._answers.append(request)

    def answer(self, at_most: int = 1000) -> None:
        """Answer what was asked, and be told what there is."""
        send_offers(self, self.segments)
        while self._answers and at_most:
            at_most -= 1
            request = self._answers.popleft()
            assert self.segments.is_pending(request)
            self.segments.on_answer(request, None)
            send_offers(self, self.segments)

    def read(self, place: Mapped, nbytes: int) -> bytes:
        return ctypes.string_at(self._ranges[place.segment].address + place.offset, nbytes)

    def close(self) -> None:
        for one in self._ranges.values():
            one.close()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_cuda.standing_in(monkeypatch, ()), fake_cuda.entered(0):
        yield


@pytest.fixture
def segments(device: None) -> Iterator[Segments]:
    driver: Any = fake_cuda.modules()["storm_kernels.cuda_driver"]
    made = Segments(driver)
    yield made
    made.close()


@pytest.fixture
def daemon(segments: Segments) -> Iterator[Daemon]:
    made = Daemon(segments)
    yield made
    made.close()


@pytest.fixture
def segment(device: None) -> Iterator[ExpandableSegment]:
    """Four pieces of eight that there is room for."""
    made = ExpandableSegment(8 * PIECE)
    for number in range(4):
        made.map(number * PIECE, PIECE)
    yield made
    made.close()


def assert_seen(
    daemon: Daemon, place: Mapped | None, segment: ExpandableSegment, offset: int, nbytes: int
) -> None:
    """Check that the daemon reads at a place what is written at an offset now."""
    assert place is not None
    data = random.Random(offset).randbytes(nbytes)
    segment.bytes(offset, nbytes)[:] = data
    assert daemon.read(place, nbytes) == data


def test_what_was_unmapped_is_freed_by_a_sweep(
    segment: ExpandableSegment, segments: Segments, daemon: Daemon
) -> None:
    segments.find(segment.address, 4 * PIECE)
    daemon.answer()
    before = len(fake_cuda.live)
    for number in range(4):
        segment.unmap(number * PIECE)
    assert len(fake_cuda.live) == before
    assert segments.sweep()
    daemon.answer()
    assert len(fake_cuda.live) == before - 5  # the daemon's range as well
    assert not segments.sweep()
    assert len(segments) == 0


def test_nothing_is_retained_once_the_daemon_is_gone(
    segment: ExpandableSegment, segments: Segments, daemon: Daemon
) -> None:
    segments.find(segment.address, 4 * PIECE)
    before = len(fake_cuda.live)
    segments.close()
    assert segments.find(segment.address, PIECE) is None
    segment.close()
    assert len(fake_cuda.live) == before - 5


def test_what_is_unmapped_before_the_answer_is_unmapped_after_it(
    segment: ExpandableSegment, segments: Segments, daemon: Daemon
) -> None:
    segments.find(segment.address, 2 * PIECE)
    daemon.answer(at_most=1)  # for the range
    segment.unmap(0)
    assert not segments.sweep()
    daemon.answer()
    assert daemon.posted[3:] == [UnmapSegment(2)]


def test_memory_that_was_not_made_to_be_shared_stays_unmapped(
    segment: ExpandableSegment, segments: Segments, daemon: Daemon
) -> None:
    segment.map(4 * PIECE, PIECE, shareable=False)
    for _ in range(2):
        assert segments.find(segment.address + 4 * PIECE, PIECE) is None
        daemon.answer()
    assert [type(message) for message in daemon.posted] == [ReserveRange]
    assert segments.find(segment.address, PIECE) is None
    daemon.answer()
    assert segments.find(segment.address, PIECE) is not None


def test_descriptors_wait_for_a_daemon_that_reads(
    segment: ExpandableSegment, segments: Segments, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storm_client.lanes.segments.MAX_PIECES_WAITING", 2)
    segments.find(segment.address, 4 * PIECE)
    daemon.reads = False
    daemon.answer()
    assert [type(message) for message in daemon.posted] == [ReserveRange]
    daemon.reads = True
    send_offers(daemon, segments)
    assert len(daemon.posted) == 3
    daemon.answer()
    assert segments.find(segment.address, 4 * PIECE) is not None


def test_another_daemon_maps_pieces_again(
    segment: ExpandableSegment, segments: Segments, daemon: Daemon
) -> None:
    segments.find(segment.address, 3 * PIECE)
    daemon.answer()
    segment.unmap(PIECE)
    offers = segments.offers()
    assert [type(offer) for offer in offers] == [ReserveRange, MapPiece, MapPiece]
    other, mapped = Daemon(segments), set()
    for offer in offers:
        if isinstance(offer, MapPiece):
            descriptor = segments.piece_descriptor(offer.segment)
            assert descriptor is not None
            other.send_descriptor(offer.segment, descriptor)
            os.close(descriptor)
        other.defer(0, offer)
        mapped.add(offer.segment)
    other._answers.clear()
    segment.map(PIECE, PIECE)
    segments.find(segment.address, 4 * PIECE)  # while another daemon was looked for
    segments.resume(mapped, mapped)
    other.answer()
    place = segments.find(segment.address, 4 * PIECE)
    assert_seen(other, place, segment, 0, 4 * PIECE)
    other.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_is_what_the_daemon_sees(
    segments: Segments, daemon: Daemon, seed: int
) -> None:
    """Whatever PyTorch maps and unmaps, and whenever the daemon answers."""
    chance = random.Random(seed)
    with fake_cuda.entered(0):
        made = [ExpandableSegment(8 * PIECE) for _ in range(2)]
    found = 0
    for _ in range(300):
        segment = chance.choice(made)
        offset = chance.randrange(8) * PIECE
        if offset in segment.mapped and chance.random() < 0.3:
            segment.unmap(offset)
        elif offset not in covered(segment):
            is_pair = offset + PIECE not in {*covered(segment), 8 * PIECE} and chance.random() < 0.5
            segment.map(offset, 2 * PIECE if is_pair else PIECE)
        offset, nbytes = chance.randrange(8 * PIECE), chance.randint(1, 3 * PIECE)
        used = range(offset // PIECE * PIECE, offset + nbytes, PIECE)
        if covered(segment).issuperset(used):
            place = segments.find(segment.address + offset, nbytes)
            if place is not None:
                found += 1
                assert_seen(daemon, place, segment, offset, nbytes)
        if chance.random() < 0.2:
            segments.sweep()
        daemon.answer(chance.randrange(4))
    assert found > 20
    for segment in made:
        segment.close()


def covered(segment: ExpandableSegment) -> set[int]:
    """Return where something is mapped, by the piece."""
    ends = {at: at + one.nbytes for at, (one, _) in segment.mapped.items()}
    return {at for begin, end in ends.items() for at in range(begin, end, PIECE)}
