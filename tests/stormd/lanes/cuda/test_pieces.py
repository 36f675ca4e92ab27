"""Memory that is mapped piece by piece, as the cuda lane uses it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import fake_cuda
from support.cuda_bench import PART, SESSION, Bench
from support.fake_virtual_memory import AddressRange, ExpandableSegment, retain_piece, share_piece
from support.fake_virtual_memory import release_piece as release
from support.waiting import wait_until

from stormd.ledger.events import RestoreDone, SegmentMapped, SegmentRefused, StoreDone
from stormd.protocol import MapPiece, ReserveRange

RANGE, FIRST = 4, 5
PIECE = PART
"""So that a part that does not begin where a piece does lies in two."""


@pytest.fixture
def segment(bench: Bench) -> Iterator[ExpandableSegment]:
    """A client's range with four pieces."""
    with fake_cuda.entered(0):
        made = ExpandableSegment(8 * PIECE)
        for number in range(4):
            made.map(number * PIECE, PIECE)
    yield made
    with fake_cuda.entered(0):
        made.close()


def map_pieces(bench: Bench, segment: ExpandableSegment, *numbers: int) -> None:
    """Map pieces by the place that they have among the others."""
    mapped = sum(isinstance(result, SegmentMapped) for result in bench.results)
    for index, number in enumerate(numbers, mapped + 1):
        with fake_cuda.entered(0):
            handle = retain_piece(segment.address + number * PIECE)
            assert handle is not None
            descriptor = share_piece(handle)
            release(handle)
        offer = MapPiece(segment=FIRST + number, into=RANGE, offset=number * PIECE, nbytes=PIECE)
        bench.lane.map_segment(SESSION, offer, descriptor)
        bench.expect(SegmentMapped, index)


def reserve(bench: Bench) -> None:
    bench.map()
    bench.lane.map_segment(SESSION, ReserveRange(segment=RANGE, nbytes=8 * PIECE))
    bench.expect(SegmentMapped, 2)


def reserve_alone(bench: Bench) -> None:
    """Reserve a range in a session that has no staging area: its first offer was a barrier."""
    bench.lane.map_segment(SESSION, ReserveRange(segment=RANGE - 1, nbytes=PIECE))
    bench.lane.unmap_segment(SESSION, RANGE - 1)
    bench.lane.map_segment(SESSION, ReserveRange(segment=RANGE, nbytes=8 * PIECE))
    bench.expect(SegmentMapped, 2)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("begin", [reserve, reserve_alone])
def test_a_part_that_lies_in_two_pieces_goes_and_comes_back(
    begin: Callable[[Bench], None], bench: Bench, segment: ExpandableSegment
) -> None:
    begin(bench)
    before = open_files()
    map_pieces(bench, segment, 0, 1, 2)
    assert open_files() == before
    memory = segment.bytes(0, 4 * PIECE)
    plain = os.urandom(PART)
    memory[PIECE // 2 : PIECE // 2 + PART] = plain
    bench.store(1, PIECE // 2, PART, segment=RANGE)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    bench.restore(2, block, PIECE + 64, PART, segment=RANGE)
    bench.publish(2)
    bench.expect(RestoreDone)
    assert bytes(memory[PIECE + 64 : PIECE + 64 + PART]) == plain


def test_a_piece_is_let_go_after_its_jobs_and_another_takes_its_place(
    bench: Bench, segment: ExpandableSegment
) -> None:
    reserve(bench)
    map_pieces(bench, segment, 0)
    plain = os.urandom(PART)
    segment.bytes(0, PART)[:] = plain
    bench.store(1, 0, PART, segment=RANGE)
    bench.lane.unmap_segment(SESSION, FIRST)
    with fake_cuda.entered(0):
        segment.unmap(0)
        segment.map(0, PIECE)
    bench.publish(1)
    map_pieces(bench, segment, 0)
    block = bench.expect(StoreDone).block
    bench.restore(2, block, 0, PART, segment=RANGE)
    bench.publish(2)
    bench.expect(RestoreDone)
    assert bytes(segment.bytes(0, PART)) == plain


def test_a_range_goes_with_its_pieces(bench: Bench, segment: ExpandableSegment) -> None:
    reserve(bench)
    map_pieces(bench, segment, 0, 1)
    bench.lane.unmap_segment(SESSION, RANGE)
    wait_until(lambda: not any(isinstance(one, AddressRange) for one in list(fake_cuda.live)))


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (MapPiece(segment=9, into=RANGE, offset=0, nbytes=PIECE), "it is no piece"),
        (MapPiece(segment=9, into=3, offset=0, nbytes=PIECE), "no range of addresses"),
        (ReserveRange(segment=9, nbytes=1 << 40), "16 times the 1.0 GiB of the GPU"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_piece_is_refused(
    bench: Bench, offer: MapPiece | ReserveRange, reason: str
) -> None:
    reserve(bench)
    before = open_files()
    descriptor = os.open("/dev/null", os.O_RDONLY) if isinstance(offer, MapPiece) else -1
    bench.lane.map_segment(SESSION, offer, descriptor)
    assert reason in bench.expect(SegmentRefused).detail
    wait_until(lambda: open_files() == before)
