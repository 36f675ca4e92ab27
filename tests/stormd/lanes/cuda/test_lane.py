"""The cuda lane's order and answers, on a device made of threads; its GPU part is e2e."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from storm_kernels import ancf
from support import fake_cuda
from support.cuda_bench import (
    LANE_MODULES,
    PART,
    SESSION,
    Bench,
    fill,
    held_back,
    hello,
    lanes_on_fake_devices,
    offer,
    prompt_and_late,
)
from support.waiting import wait_until

from stormd.errors import LaneUnavailable
from stormd.lanes import Speeds
from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import (
    RestoreDone,
    SegmentMapped,
    SegmentRefused,
    StoreDone,
    StoreFailed,
    StoreJob,
)
from stormd.monitoring.link_meter import LinkLimit
from stormd.protocol import MapSegment
from stormd.protocol.limits import MAX_ID
from stormd.protocol.timeline import STORED

SESSION_PARTS = {False: 6, True: 4}
"""What a session takes of the device without MPS and with it, as part_bytes_cuda is described."""


@prompt_and_late
@pytest.mark.parametrize("codec", ["ancf", "raw"])
def test_what_was_stored_comes_back(bench: Bench, codec: str) -> None:
    bench.map()
    before = fill(bench)
    for entry in range(1, 9):
        bench.store(entry, (entry - 1) * PART, PART - 2 * entry, codec)
    bench.publish(8)
    bench.expect(StoreDone, 8)
    blocks = {done.entry: done.block for done in bench.results if isinstance(done, StoreDone)}
    assert bench.counters.read(STORED) == 8
    bench.memory[:] = 0xA5
    for entry, block in blocks.items():
        bench.restore(8 + entry, block, (entry - 1) * PART, PART - 2 * entry)
    bench.publish(16)
    bench.expect(RestoreDone, 8)
    for entry in blocks:
        begin, end = (entry - 1) * PART, entry * PART - 2 * entry
        assert np.array_equal(bench.memory[begin:end], before[begin:end])
        assert (bench.memory[end : entry * PART] == 0xA5).all()


def test_nothing_is_read_before_it_is_published(bench: Bench) -> None:
    bench.map()
    bench.memory[:] = 0
    bench.store(1, 0, PART)
    bench.publish(1)
    bench.expect(StoreDone)
    bench.store(2, PART, PART)
    assert bench.counters.read(STORED) == 1
    before = fill(bench)  # as if the client's copy came only now
    bench.publish(2)
    second = bench.expect(StoreDone, 2)
    bench.restore(3, second.block, 0, PART)
    bench.publish(3)
    bench.expect(RestoreDone)
    assert np.array_equal(bench.memory[:PART], before[PART : 2 * PART])


@pytest.mark.parametrize(("published", "stored"), [(1, 1), (MAX_ID, 12)])
def test_numbers_of_any_kind_delay_only_their_own_client(
    bench: Bench, published: int, stored: int
) -> None:
    """A right client's numbers only grow, and stay below POISON."""
    bench.map()
    bench.store(1, 0, PART)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    bench.restore(1, block, PART, PART, sequence=MAX_ID)
    wait_until(lambda: bench.lane._sessions[SESSION].restores._begun)
    numbers = (7, 2, 2, 0, MAX_ID, 1, 1, 0, 5, MAX_ID, 6)
    for number in numbers:
        bench.store(number, 0, PART)
        bench.lane.skip_sequence(SESSION, number // 2)
    bench.publish(published)
    bench.expect(StoreDone, stored)
    other = Bench(bench.lane, bench.pool, bench.space, bench.results, session=SESSION + 1)
    other.map()
    other.store(1, 0, PART)
    other.publish(1)
    wait_until(lambda: other.counters.read(STORED) == 1)
    other.end()
    bench.end()
    bench.expect(RestoreDone)
    answered = [one.entry for one in bench.results if isinstance(one, StoreDone | StoreFailed)]
    assert sorted(answered) == sorted((*numbers, 1, 1))


def test_restores_that_wait_for_their_client_hold_up_no_store(bench: Bench) -> None:
    """A client's stream may wait for a store before it comes to what the restores wait for."""
    bench.map()
    before = fill(bench)
    bench.store(1, 0, PART, "raw")
    bench.publish(1)
    block = bench.expect(StoreDone).block
    for ticket in range(101, 111):
        bench.restore(ticket, block, PART, PART)
    restores = bench.lane._sessions[SESSION].restores
    wait_until(lambda: len(restores._begun) == SESSION_PARTS[False] - 1)
    for entry in range(2, 10):
        bench.store(entry, 0, PART, "raw")
    bench.publish(9)
    bench.expect(StoreDone, 9)
    bench.publish(110)
    bench.expect(RestoreDone, 10)
    assert np.array_equal(bench.memory[PART : 2 * PART], before[:PART])


@pytest.mark.parametrize("shared", [False, True])
def test_a_session_takes_the_memory_of_so_many_parts(
    monkeypatch: pytest.MonkeyPatch, lanes: Callable[[list[int]], Bench], shared: bool
) -> None:
    monkeypatch.setattr(fake_cuda, "shared_by_mps", shared)
    bench = lanes([0])
    with fake_cuda.entered(0):
        before = set(fake_cuda.live)
    bench.map()
    taken = fake_cuda.live - before
    nbytes = sum(one.nbytes for one in taken if isinstance(one, fake_cuda.DeviceBuffer))
    assert SESSION_PARTS[shared] <= nbytes / PART < SESSION_PARTS[shared] + 1


def test_a_rejected_store_is_passed_over_also_before_any_segment(bench: Bench) -> None:
    bench.lane.skip_sequence(SESSION, 5)
    wait_until(lambda: bench.counters.read(STORED) == 5)


@pytest.fixture
def broken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The entries whose encoders leave nothing of use; a test adds them."""
    stores = sys.modules["stormd.lanes.cuda.stores"]
    encoded, entries = stores._encoded, set[int]()

    def left(job: StoreJob, *where: Any) -> Any:
        if job.entry in entries:
            raise RuntimeError("the encoder left nothing")
        return encoded(job, *where)

    monkeypatch.setattr(stores, "_encoded", left)
    return entries


@prompt_and_late
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_all_sources_may_be_used_again(
    bench: Bench, broken: set[int], seed: int
) -> None:
    """The client's streams wait for that: what is encoded, raw, broken or rejected, in turns."""
    chance = random.Random(seed)
    bench.map()
    fill(bench)
    stored = failed = published = 0
    last = 24
    for entry in range(1, last + 1):
        kind = chance.choice(["ancf", "raw", "broken", "rejected"])
        if kind == "rejected":
            bench.lane.skip_sequence(SESSION, entry)
            continue
        if kind == "broken":
            broken.add(entry)
        codec = "raw" if kind == "raw" else "ancf"
        bench.store(entry, 0, PART, codec)
        stored, failed = stored + (kind != "broken"), failed + (kind == "broken")
        if chance.random() < 0.3:
            published = chance.randint(published, entry)
            bench.publish(published)
    bench.publish(last)
    if stored:
        bench.expect(StoreDone, stored)
    if failed:
        bench.expect(StoreFailed, failed)
    wait_until(lambda: bench.counters.read(STORED) == last)


def test_what_is_not_compiled_yet_is_stored_raw(bench: Bench) -> None:
    bench.map()
    before = fill(bench)
    ready = next(iter(bench.lane._devices.values())).codec._ready
    wait_until(lambda: ready.get(ancf.DType.BFLOAT16) == "auto")
    ready.pop(ancf.DType.BFLOAT16)
    bench.store(1, 0, PART)
    bench.publish(1)
    done = bench.expect(StoreDone)
    assert (done.mode, done.block.nbytes) == ("raw", blob_bound(PART))
    ready[ancf.DType.BFLOAT16] = "auto"
    bench.restore(2, done.block, 3 * PART, PART)
    bench.publish(2)
    bench.expect(RestoreDone)
    assert np.array_equal(bench.memory[3 * PART : 4 * PART], before[:PART])


def test_a_gpu_that_is_not_served_and_handles_of_nothing_are_refused(bench: Bench) -> None:
    with pytest.raises(LaneUnavailable, match=f"does not serve the GPU abc, only {fake_cuda.UUID}"):
        bench.lane.attach(99, hello("abc"))
    bench.lane.map_segment(SESSION, offer(bench.area, bench.area.nbytes + 1))
    assert "1048576 bytes, not 1048577" in bench.expect(SegmentRefused).detail
    bench.lane.map_segment(SESSION, MapSegment(segment=0, handle=b"x" * 64, nbytes=8))
    assert "CUDA_ERROR_INVALID_VALUE" in bench.expect(SegmentRefused, 2).detail


def test_a_store_that_fails_frees_no_source_that_is_yet_to_be_read(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    bench.map()
    fill(bench)
    bench.publish(2)
    stores = sys.modules["stormd.lanes.cuda.stores"]
    result = stores.EncoderResult
    left = iter([result(0, 7, 1)])
    monkeypatch.setattr(stores, "EncoderResult", lambda *words: next(left, result(*words)))
    begun = bench.lane._sessions[SESSION].stores._begun
    with held_back(bench) as first:
        bench.store(1, 0, PART)
        wait_until(lambda: len(begun) == 1)
        with held_back(bench):
            bench.store(2, PART, PART)
            wait_until(lambda: len(begun) == 2)
            first.set()
            assert bench.expect(StoreFailed).entry == 1
            assert bench.counters.read(STORED) == 1
    bench.expect(StoreDone)
    wait_until(lambda: bench.counters.read(STORED) == 2)


def test_what_the_encoder_left_is_checked_by_any_interpreter(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """No assertion: an optimised interpreter would place and copy whatever the size says."""
    bench.map()
    fill(bench)
    stores = sys.modules["stormd.lanes.cuda.stores"]
    result = stores.EncoderResult
    wrong = ((0, 0, 1), (blob_bound(PART) + 1, 0, 1), (1 << 63, 0, 1), (100, 7, 1))
    for entry, left in enumerate(wrong, 1):
        monkeypatch.setattr(stores, "EncoderResult", lambda *_, left=left: result(*left))
        bench.store(entry, 0, PART)
        bench.publish(entry)
        failed = bench.expect(StoreFailed, entry)
        assert failed.detail.startswith("RuntimeError: the encoder left status")


def test_each_device_serves_its_own_sessions(lanes: Callable[[list[int]], Bench]) -> None:
    first = lanes([0, 1])
    second = Bench(first.lane, first.pool, first.space, first.results, SESSION + 1, ordinal=1)
    for number, bench in enumerate((first, second), 1):
        bench.lane.map_segment(bench.session, offer(bench.area))
        bench.expect(SegmentMapped, number)
        before = fill(bench, seed=number)
        bench.store(number, 0, PART)
        bench.publish(number)
        block = bench.expect(StoreDone, number).block
        bench.restore(2 + number, block, PART, PART)
        bench.publish(2 + number)
        bench.expect(RestoreDone, number)
        assert np.array_equal(bench.memory[PART : 2 * PART], before[:PART])
    assert [link.device for link in first.lane.links] == ["cuda:0", "cuda:1"]
    assert all(link.as_status()["store"]["bytes"] for link in first.lane.links)
    at_start = (32 << 20) * 1000  # all that is timed on these devices takes a millisecond
    assert first.lane.speeds(first.session) == Speeds(link=at_start)
    first.lane.limit_link(12 * 10**9)
    for link, rate in zip(first.lane.links, (50 * 10**9, 25 * 10**9), strict=True):
        link.copied("store", 64 * rate, 64.0)
        link.coded("store", 1 << 30, 2**30 / (8 * rate))
        link.coded("restore", 1 << 30, 2**30 / (8 * rate))
    told = [first.lane.speeds(bench.session) for bench in (first, second)]
    assert [[speed / 1e9 for speed in one] for one in told] == [
        [pytest.approx(50, rel=0.01), 12, pytest.approx(200)],
        [pytest.approx(25, rel=0.01), 12, pytest.approx(100)],
    ]
    assert first.lane.speeds(SESSION + 2) == Speeds()
    second.end()


# --- a pool that grows ----------------------------------------------------------------------

BORDER = 1 << 20


@pytest.fixture
def growing_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A lane over a pool of which the first MiB is there and taken, but for half a part."""
    lanes = contextmanager(lanes_on_fake_devices)
    with fake_cuda.standing_in(monkeypatch, LANE_MODULES), lanes(BORDER) as lane_on:
        bench = lane_on([0])
        assert bench.space.promise(BORDER - PART // 2)
        taken = bench.space.place(BORDER - PART // 2, BORDER - PART // 2)
        yield bench
        bench.space.release(taken)


@pytest.mark.parametrize(("codec", "was_lent"), [("ancf", False), ("raw", True)])
def test_a_blob_across_what_the_pool_began_with_and_what_came_later_comes_back(
    growing_bench: Bench, codec: str, *, was_lent: bool
) -> None:
    """Also where what came later had been there before, and had gone to another worker."""
    bench = growing_bench
    bench.map()
    before = fill(bench)
    bench.pool.commit(BORDER, BORDER, beside=0)
    if was_lent:
        bench.lane.extend(BORDER, BORDER)
        bench.lane.retract(BORDER, BORDER)
        bench.pool.give_back(BORDER, BORDER)
        bench.pool.commit(BORDER, BORDER, beside=0)
    grower = threading.Thread(target=bench.lane.extend, args=(BORDER, BORDER))
    grower.start()
    grower.join()
    bench.space.grow(BORDER)
    bench.store(1, 0, PART, codec)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    assert block.offset < BORDER < block.offset + block.nbytes
    bench.memory[:] = 0xA5
    bench.restore(2, block, 0, PART)
    bench.publish(2)
    bench.expect(RestoreDone)
    assert np.array_equal(bench.memory[:PART], before[:PART])


def test_a_range_that_the_driver_does_not_take_is_told_of_and_not_used(
    growing_bench: Bench,
) -> None:
    bench = growing_bench
    with pytest.raises(LaneUnavailable, match=r"registered further.*ALREADY_REGISTERED"):
        bench.lane.extend(0, BORDER)
    bench.pool.commit(BORDER, BORDER, beside=0)
    bench.lane.extend(BORDER, BORDER)


class SlowLink(LinkLimit):
    """A byte a second, by a clock that a test moves; counts who was told to wait."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told_to_wait = 0
        super().__init__(1, clock=lambda: self.now)

    def has_ended(self, at: float) -> bool:
        has_ended = super().has_ended(at)
        self.told_to_wait += not has_ended
        return has_ended


@pytest.mark.parametrize("codec", ["ancf", "raw"])
def test_copies_over_a_limited_link_are_answered_when_they_would_be_over(
    bench: Bench, codec: str
) -> None:
    (device,) = bench.lane._devices.values()
    link = device.limit = SlowLink()
    bench.map()
    fill(bench)
    bench.store(1, 0, PART, codec)
    bench.publish(1)
    wait_until(lambda: link.told_to_wait)
    assert not any(isinstance(one, StoreDone) for one in bench.results)
    link.now = link._free["store"]
    block = bench.expect(StoreDone).block
    assert link.now == 100.0 + block.nbytes
    link.told_to_wait = 0
    bench.restore(2, block, 0, PART)
    bench.publish(2)
    wait_until(lambda: link.told_to_wait)
    assert not any(isinstance(one, RestoreDone) for one in bench.results)
    link.now = link._free["restore"]
    bench.expect(RestoreDone)
