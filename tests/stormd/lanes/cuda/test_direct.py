"""Parts that are copied to the pool as they are while no encoder of the daemon can run."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from storm_kernels.ancf import DType, reference
from support import fake_cuda
from support.cuda_bench import PART, SESSION, Bench, fill, held, held_back
from support.spilling import read_bytes
from support.waiting import wait_until

from stormd.lanes.cuda.direct import LATE_SECONDS, MAX_COPIES, StoreState, should_copy_unencoded
from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import (
    Detached,
    RestoreDone,
    RestoreFailed,
    StoreDone,
    StoreFailed,
)
from stormd.memory.arena import GRANULE, Block
from stormd.protocol.timeline import STORED

ROOM_PARTS = 3
"""Of stores, that have room in scratch under MPS."""

LATE = StoreState(encoders_wait=LATE_SECONDS, blobs=0, copies=0, link_is_idle=True)


@pytest.mark.parametrize(
    ("outlook", "expected"),
    [
        (LATE, True),
        (LATE._replace(encoders_wait=0.9 * LATE_SECONDS), False),
        (LATE._replace(encoders_wait=0.0), False),
        (LATE._replace(link_is_idle=False), False),  # somebody else's blob is there
        (LATE._replace(link_is_idle=False, blobs=1), False),
        (LATE._replace(link_is_idle=False, copies=1), True),  # the next follows without a gap
        (LATE._replace(link_is_idle=False, copies=1, blobs=1), False),
        (LATE._replace(link_is_idle=False, copies=MAX_COPIES), False),
    ],
)
def test_a_part_goes_as_it_is_where_the_link_is_free_and_encoders_are_late(
    outlook: StoreState, expected: bool
) -> None:
    assert should_copy_unencoded("ancf", outlook) is expected
    assert should_copy_unencoded("raw", outlook) is (outlook.copies < MAX_COPIES)


class Clock:
    """The time that scratch reads, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self) -> None:
        self.now += LATE_SECONDS


@pytest.fixture
def clock(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sys.modules["stormd.lanes.cuda.scratch"], "monotonic", made)
    return made


@pytest.fixture
def bench(lanes: Callable[[list[int]], Bench], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Under MPS, with parts of which each makes up a batch; mapped, filled, all published."""
    monkeypatch.setattr(fake_cuda, "shared_by_mps", True)
    made = lanes([0])
    monkeypatch.setattr(sys.modules["stormd.lanes.cuda.scratch"], "MAX_BATCH_BYTES", PART // 8)
    made.map()
    fill(made)
    made.publish(99)
    return made


def link(bench: Bench) -> Any:
    """Return the stream that copies to the pool."""
    return next(iter(bench.lane._devices.values())).down


def opened(bench: Bench) -> Any:
    """Return what the session has on the device."""
    return bench.lane._sessions[bench.session]._client.opened


def copies(bench: Bench) -> list[Any]:
    """Return the scratch of what is being copied as it is, or waits for its checksum."""
    return [
        scratch for _, scratch in tuple(bench.lane._sessions[bench.session].stores._out_of_order)
    ]


def begun(bench: Bench) -> list[bool]:
    """Return a False for each batch whose encoders have yet to pass, a True for each of these."""
    encoding = len(bench.lane._sessions[bench.session].stores._begun)
    return [False] * encoding + [True] * len(copies(bench))


def wait_for_looks(bench: Bench, small: int | None = None) -> None:
    """Wait until the next part, or a `small` one put last, has often been found to have to wait."""
    if small is not None:
        bench.store(small, 0, 700)
    scratch = opened(bench).scratch.out
    asked, real = itertools.count(), scratch.has_for

    def has_for(job: Any) -> bool:
        next(asked)
        return bool(real(job))

    scratch.has_for = has_for
    wait_until(lambda: next(asked) > 20)
    del scratch.has_for


def blob_in(bench: Bench, block: Block) -> bytes:
    return read_bytes(bench.pool.address, block)


def raw_blob(data: np.ndarray) -> bytes:
    return reference.encode(data, DType.BYTES, mode="raw").tobytes()


def size(entry: int) -> int:
    return PART - 2 * entry


def source(before: np.ndarray, entry: int) -> np.ndarray:
    return before[(entry - 1) * PART :][: size(entry)]


def store(bench: Bench, *entries: int, codec: str = "ancf") -> None:
    for entry in entries:
        bench.store(entry, (entry - 1) * PART, size(entry), codec)


def store_late(bench: Bench, clock: Clock, *entries: int) -> None:
    """Store parts, of which the first fill scratch and the others go as they are."""
    store(bench, *entries)
    wait_until(lambda: len(begun(bench)) >= ROOM_PARTS)
    clock.pass_by()
    wait_until(lambda: len(begun(bench)) == len(entries))
    assert begun(bench) == [False] * ROOM_PARTS + [True] * (len(entries) - ROOM_PARTS)


def answered(bench: Bench) -> list[int]:
    return [one.entry for one in bench.results if isinstance(one, StoreDone | StoreFailed)]


def done(bench: Bench, count: int) -> dict[int, StoreDone]:
    bench.expect(StoreDone, count)
    return {one.entry: one for one in bench.results if isinstance(one, StoreDone)}


def assert_back(bench: Bench, before: np.ndarray, stored: dict[int, StoreDone]) -> None:
    """Restore all to where nothing else is, and compare."""
    place = len(before) - PART
    already = sum(isinstance(one, RestoreDone) for one in bench.results)
    for number, (entry, one) in enumerate(stored.items(), already + 1):
        bench.memory[place:] = 0xA5
        bench.restore(50 + number, one.block, place, size(entry))
        bench.expect(RestoreDone, number)
        assert np.array_equal(bench.memory[place : place + size(entry)], source(before, entry))


def test_parts_go_as_they_are_while_no_encoder_can_run(bench: Bench, clock: Clock) -> None:
    before = bench.memory.copy()
    with held_back(bench):
        store(bench, *range(1, 7))
        wait_until(lambda: len(begun(bench)) == ROOM_PARTS)
        wait_for_looks(bench)
        assert begun(bench) == [False] * ROOM_PARTS  # their encoders are not late yet
        clock.pass_by()
        wait_until(lambda: begun(bench) == [False] * ROOM_PARTS + [True] * 3)
        wait_until(lambda: not any(scratch.is_on_link for scratch in copies(bench)))
        wait_for_looks(bench, 7)
        assert bench.counters.read(STORED) == 0
        assert not answered(bench)  # there are no checksums yet
    stored = done(bench, 7)
    wait_until(lambda: bench.counters.read(STORED) == 7)
    stored.pop(7)
    modes = [stored[entry].mode for entry in range(1, 7)]
    assert modes == ["window"] * ROOM_PARTS + ["raw"] * 3
    for entry in (4, 5, 6):
        assert blob_in(bench, stored[entry].block) == raw_blob(source(before, entry))
    assert_back(bench, before, stored)


def test_parts_are_encoded_again_once_encoders_run(bench: Bench, clock: Clock) -> None:
    before = bench.memory.copy()
    with held_back(bench):
        store_late(bench, clock, 1, 2, 3, 4)
    done(bench, 4)
    store(bench, *range(5, 13))  # more than there is room for, and the clock stands still
    stored = done(bench, 12)
    assert [stored[entry].mode for entry in range(4, 13)] == ["raw"] + ["window"] * 8
    assert_back(bench, before, stored)


def test_large_parts_pass_small_ones_that_wait_for_room(bench: Bench, clock: Clock) -> None:
    """And what is stored is told in order all the same, also if a later store was rejected."""
    before = bench.memory.copy()
    with held_back(bench) as large:
        store(bench, 1, 2, 3)
        wait_until(lambda: len(begun(bench)) == ROOM_PARTS)
        bench.store(4, 3 * PART, 700)
        store(bench, 5, 6)
        bench.lane.skip_sequence(SESSION, 7)
        wait_for_looks(bench)
        assert begun(bench) == [False] * ROOM_PARTS
        clock.pass_by()
        wait_until(lambda: begun(bench) == [False] * ROOM_PARTS + [True] * 2)
        with held(opened(bench).store_stream):
            large.set()
            assert set(done(bench, 5)) == {1, 2, 3, 5, 6}
            assert bench.counters.read(STORED) == 3
    stored = done(bench, 6)
    wait_until(lambda: bench.counters.read(STORED) == 7)
    assert [stored[entry].mode for entry in (5, 6)] == ["raw"] * 2
    stored.pop(4)
    assert_back(bench, before, stored)


def test_raw_parts_go_as_they_are_two_at_a_time(bench: Bench) -> None:
    before = bench.memory.copy()
    with held(link(bench)):
        store(bench, *range(1, 6), codec="raw")
        wait_until(lambda: len(begun(bench)) == MAX_COPIES)
        wait_for_looks(bench)
        assert begun(bench) == [True] * MAX_COPIES
        assert bench.counters.read(STORED) == 0  # though all kernels may run
    stored = done(bench, 5)
    wait_until(lambda: bench.counters.read(STORED) == 5)
    for entry, one in stored.items():
        assert one.mode == "raw"
        assert blob_in(bench, one.block) == raw_blob(source(before, entry))
    (meter,) = bench.lane.links
    assert meter.as_status()["store"]["bytes"] == sum(one.block.nbytes for one in stored.values())
    assert_back(bench, before, stored)


def test_a_blob_that_lies_in_many_pieces(
    bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two of which hold no more than the header."""
    monkeypatch.setattr(fake_cuda, "lag_seconds", 0.0)  # each piece is a copy
    before = bench.memory.copy()
    space, blocks = bench.space, []
    while space.promise(GRANULE):
        blocks.append(space.place(GRANULE, GRANULE))
    for block in blocks[1::2]:
        space.release(block)
    with held_back(bench):
        store_late(bench, clock, 1, 2, 3, 4)
    stored = done(bench, 4)
    assert len(stored[4].block.extents) == blob_bound(size(4)) // GRANULE + 1
    assert blob_in(bench, stored[4].block) == raw_blob(source(before, 4))
    for block in blocks[::2]:
        space.release(block)
    assert_back(bench, before, stored)


def test_damage_in_the_pool_is_told(bench: Bench) -> None:
    store(bench, 1, codec="raw")
    block = bench.expect(StoreDone).block
    ctypes.c_uint8.from_address(bench.pool.address + block.extents[0].offset + 4000).value ^= 1
    bench.restore(2, block, PART, size(1))
    assert bench.expect(RestoreFailed).kind == "CorruptBlob"


def test_what_its_client_writes_meanwhile_is_no_blob(bench: Bench, clock: Clock) -> None:
    """It may not, and no other's bytes are at stake."""
    with held_back(bench):
        store_late(bench, clock, 1, 2, 3, 4)
        wait_until(lambda: not copies(bench)[0].is_on_link)
        bench.memory[3 * PART] ^= 1
    stored = done(bench, 4)
    bench.restore(60, stored[4].block, 8 * PART, size(4))
    assert bench.expect(RestoreFailed).kind == "CorruptBlob"


def test_a_checksum_that_cannot_be_begun_costs_its_own_store_only(bench: Bench) -> None:
    before = bench.memory.copy()
    fake_cuda.CudaCodec.broken = 0
    store(bench, 1, 2, 3, codec="raw")
    failed = bench.expect(StoreFailed)
    assert (failed.entry, fake_cuda.CudaCodec.broken) == (1, None)
    assert "does not start" in failed.detail
    stored = done(bench, 2)
    wait_until(lambda: bench.counters.read(STORED) == 3)
    assert_back(bench, before, stored)


def test_a_checksum_that_was_not_made_is_no_header(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.memory.copy()
    codec = next(iter(bench.lane._devices.values())).codec
    store(bench, 1, codec="raw")
    done(bench, 1)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "check", lambda *_, **__: None)  # the last one's sums lie there yet
        store(bench, 2, codec="raw")
        failed = bench.expect(StoreFailed)
    assert (failed.entry, failed.detail[:13]) == (2, "RuntimeError:")
    store(bench, 3, codec="raw")
    stored = done(bench, 2)
    wait_until(lambda: bench.counters.read(STORED) == 3)
    assert_back(bench, before, stored)


def test_a_dead_clients_copies_are_finished_and_its_memory_let_go(
    bench: Bench, clock: Clock
) -> None:
    with held_back(bench) as encoders:
        store_late(bench, clock, 1, 2, 3, 4, 5)
        bench.lane.detach(SESSION)
        assert not answered(bench)
        encoders.set()
        wait_until(lambda: Detached(SESSION) in bench.results)
    assert sorted(answered(bench)) == [1, 2, 3, 4, 5]
    assert not any(isinstance(one, fake_cuda.IpcMapping) for one in list(fake_cuda.live))
    bench.end_client()


def test_a_broken_device_leaves_no_copy_unanswered(bench: Bench, clock: Clock) -> None:
    """Nor does it raise where the thread asks whether one more may go, which must live."""
    with held_back(bench):
        store_late(bench, clock, 1, 2, 3, 4, 5)
        going = copies(bench)
        fake_cuda.fault(0, "an illegal address")
        with fake_cuda.entered(0):
            assert not next(iter(bench.lane._devices.values())).is_link_idle()
            assert all(scratch.is_on_link for scratch in going)
        store(bench, 6)
    bench.expect(StoreFailed, 6)
    assert sorted(answered(bench)) == [1, 2, 3, 4, 5, 6]
    bench.lane.detach(SESSION)
    bench.expect(Detached)
    assert bench.lane.close(10.0)
    fake_cuda.repair()
    bench.end_client()


def test_copies_and_waits_in_one_queue(bench: Bench) -> None:
    """As on a device that has fewer of them than there are streams."""
    before = bench.memory.copy()
    with fake_cuda.entered(0):
        fake_cuda.Stream.line = fake_cuda.Stream()
    try:
        store(bench, 1, 2, 3, codec="raw")
        store(bench, 4, 5)
        assert_back(bench, before, done(bench, 5))
        bench.end()
    finally:
        line, fake_cuda.Stream.line = fake_cuda.Stream.line, None
        line.close()
