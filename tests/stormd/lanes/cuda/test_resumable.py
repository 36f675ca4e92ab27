"""Sessions of GPUs that go on with another daemon: what the page says, and what is left as it was.

The daemon's end is that of `close` with the session attached, after which nothing of it is touched;
what a kill leaves is tested with processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support import fake_cuda
from support.cuda_bench import (
    LAG_SECONDS,
    LANE_MODULES,
    PART,
    SESSION,
    Bench,
    fill,
    held_back,
    lanes_on_fake_devices,
)
from support.waiting import wait_until

from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import RestoreDone, RestoreFailed, StoreDone, StoreFailed
from stormd.protocol.timeline import PUBLISHED, STORED, restored_slot, status_slot

Lanes = Callable[..., Bench]


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lanes]:
    monkeypatch.setattr(fake_cuda, "lag_seconds", LAG_SECONDS)
    with fake_cuda.standing_in(monkeypatch, LANE_MODULES):
        yield from lanes_on_fake_devices(is_resumable=True)


@pytest.fixture
def bench(lanes: Lanes) -> Bench:
    made = lanes([0])
    made.map()
    return made


def stored(bench: Bench, count: int) -> list[StoreDone]:
    for entry in range(1, count + 1):
        bench.store(entry, (entry - 1) * PART, PART)
    bench.publish(count)
    return [bench.expect(StoreDone, number) for number in range(1, count + 1)]


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_source_is_kept_until_its_blob_is_written_down(bench: Bench, is_direct: bool) -> None:
    fill(bench)
    codec = "raw" if is_direct else "ancf"
    for entry in (1, 2):
        bench.store(entry, (entry - 1) * PART, PART, codec)
    bench.publish(2)
    blocks = [bench.expect(StoreDone, number).block for number in (1, 2)]
    assert [one.sequence for one in bench.results if isinstance(one, StoreDone)] == [1, 2]
    assert bench.counters.read(STORED) == 0
    bench.lane.recorded(SESSION, [2])
    assert bench.counters.read(STORED) == 0
    bench.lane.recorded(SESSION, [1])
    assert bench.counters.read(STORED) == 2
    for block in blocks:
        bench.space.release(block)


def test_a_store_that_fails_is_passed_over_once_that_is_written_down(bench: Bench) -> None:
    fake_cuda.CudaCodec.broken = 0
    bench.store(1, 0, PART)
    bench.publish(1)
    failed = bench.expect(StoreFailed)
    bench.space.withdraw(blob_bound(PART))
    bench.lane.skip_sequence(SESSION, 2)
    assert bench.counters.read(STORED) == 0
    bench.lane.recorded(SESSION, [failed.sequence])
    assert bench.counters.read(STORED) == 2


def test_what_was_encoded_and_not_written_down_is_read_again(bench: Bench, lanes: Lanes) -> None:
    before = fill(bench)
    first, second = stored(bench, 2)
    bench.lane.recorded(SESSION, [1])
    bench.space.release(second.block)  # the journal says nothing of it
    assert bench.lane.close(10.0)
    assert bench.counters.read(STORED) == 1
    assert bench.counters.read(PUBLISHED) == 2  # no client that lives is released from anything
    lanes([0], bench)
    bench.store(2, PART, PART)
    again = bench.expect(StoreDone)
    bench.lane.recorded(SESSION, [2])
    assert bench.counters.read(STORED) == 2
    for ticket, done in ((3, first), (4, again)):
        bench.restore(ticket, done.block, 8 * PART + (ticket - 3) * PART, PART)
    bench.publish(4)
    bench.expect(RestoreDone, 2)
    assert np.array_equal(bench.memory[8 * PART : 10 * PART], before[: 2 * PART])
    for done in (first, again):
        bench.space.release(done.block)


def test_numbers_that_were_answered_before_are_waited_for_by_nobody(
    bench: Bench, lanes: Lanes
) -> None:
    """A stream may wait for one that lies between two which are asked for again, or behind them."""
    fill(bench)
    assert bench.lane.close(10.0)
    lanes([0], bench)
    bench.publish(2)
    bench.store(2, 0, PART)
    bench.store(8, 0, PART)
    bench.lane.skip_sequence(SESSION, 20)
    bench.lane.recorded(SESSION, [bench.expect(StoreDone).sequence])
    assert bench.counters.read(STORED) == 7
    bench.publish(8)
    bench.lane.recorded(SESSION, [bench.expect(StoreDone, 2).sequence])
    assert bench.counters.read(STORED) == 20
    for done in (bench.expect(StoreDone, 1), bench.expect(StoreDone, 2)):
        bench.space.release(done.block)


def test_the_page_says_what_became_of_a_restore(bench: Bench) -> None:
    fill(bench)
    (done,) = stored(bench, 1)
    bench.restore(2, done.block, PART, PART)
    bench.publish(2)
    bench.expect(RestoreDone)
    assert bench.counters.read(restored_slot(2)) == 2
    assert bench.counters.read(status_slot(2)) == 0
    address = bench.pool.address + done.block.extents[0].offset
    bench_bytes = np.frombuffer((fake_cuda.ctypes.c_uint8 * PART).from_address(address), np.uint8)
    bench_bytes[4000] ^= 0xF0
    bench.restore(3, done.block, PART, PART)
    bench.publish(3)
    bench.expect(RestoreFailed)
    assert bench.counters.read(restored_slot(3)) == 3
    assert bench.counters.read(status_slot(3)) not in (0, (1 << 64) - 1)
    bench.space.release(done.block)


def test_restores_of_one_counter_leave_their_own_status(bench: Bench) -> None:
    """More than there are counters: of two that share one, only the first is in the page."""
    fill(bench)
    (done,) = stored(bench, 1)
    tickets = (2, 2 + 1024, 2 + 2048)
    for ticket in tickets:
        bench.restore(ticket, done.block, PART, PART)
    bench.publish(max(tickets))
    bench.expect(RestoreDone, 3)
    assert bench.counters.read(restored_slot(2)) == max(tickets)
    bench.space.release(done.block)


def test_a_restore_whose_turn_has_not_come_is_left_undone(bench: Bench, lanes: Lanes) -> None:
    """Its client lives, and its memory may be another's until then."""
    before = fill(bench)
    (done,) = stored(bench, 1)
    bench.restore(2, done.block, PART, PART)
    restores = bench.lane._sessions[SESSION].restores
    wait_until(lambda: bool(restores._begun))
    assert bench.lane.close(10.0)
    bench.publish(2)
    assert np.array_equal(bench.memory, before)
    assert bench.counters.read(restored_slot(2)) == 0
    lanes([0], bench)
    bench.restore(2, done.block, PART, PART)
    bench.expect(RestoreDone)
    assert np.array_equal(bench.memory[PART : 2 * PART], before[:PART])
    bench.space.release(done.block)


def test_what_the_device_was_given_is_done_when_the_lane_is_closed(
    bench: Bench, lanes: Lanes
) -> None:
    fill(bench)
    with held_back(bench):
        bench.store(1, 0, PART)
        bench.publish(1)
        wait_until(lambda: bool(bench.lane._sessions[SESSION].stores._begun))
        assert not bench.lane.close(0.05)
    wait_until(lambda: bench.lane.close(0.05))
    assert not bench.results[1:]  # but for the segment's
    bench.space.withdraw(blob_bound(PART))
    lanes([0], bench)


def test_segments_that_are_unmapped_meanwhile_keep_nobody(bench: Bench, lanes: Lanes) -> None:
    fill(bench)
    (done,) = stored(bench, 1)
    bench.restore(2, done.block, PART, PART)
    wait_until(lambda: bool(bench.lane._sessions[SESSION].restores._begun))
    bench.lane.unmap_segment(SESSION, 0)  # once that restore is done, which is when its turn comes
    assert bench.lane.close(10.0)
    lanes([0], bench)
    bench.space.release(done.block)
