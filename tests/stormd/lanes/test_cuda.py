"""The cuda lane's order, answers and ends, on a device made of threads; its GPU part is e2e."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from storm_kernels import ancf
from support import fake_cuda
from support.waiting import wait_until

from stormd.arena import Space
from stormd.errors import LaneUnavailable
from stormd.host_pool import HostPool
from stormd.lanes import (
    Detached,
    RestoreDone,
    RestoreFailed,
    RestoreJob,
    Result,
    SegmentMapped,
    SegmentRefused,
    StoreDone,
    StoreFailed,
    StoreJob,
    blob_bound,
    parse_dtype,
)
from stormd.protocol import Hello, MapSegment
from stormd.protocol.timeline import PAGE_BYTES, PUBLISHED, RESTORED, STORED, Timelines

KIB = 1 << 10
MIB = 1 << 20
PART = 64 * KIB
LANE_MODULES = tuple(
    f"stormd.lanes.{name}" for name in ("cuda", "cuda_codec", "cuda_device", "cuda_session")
)
SESSION = 0x1234


class Bench:
    """A lane on the fake device with one session, driven as the ledger and a client would."""

    def __init__(self, lane: Any, pool: HostPool, space: Space, results: list[Result]) -> None:
        self.lane, self.pool, self.space, self.results = lane, pool, space, results
        attachment = lane.attach(SESSION, hello())
        (descriptor,) = attachment.descriptors
        self.part_bytes = attachment.part_bytes
        self._page = mmap.mmap(descriptor, PAGE_BYTES)
        os.close(descriptor)
        self.counters = Timelines(ctypes.addressof(ctypes.c_char.from_buffer(self._page)))
        self.area = fake_cuda.DeviceBuffer(attachment.staging_bytes)
        self.memory = np.frombuffer(self.area._bytes, np.uint8)

    def map(self) -> None:
        self.lane.map_segment(SESSION, offer(self.area))
        self.expect(SegmentMapped)

    def expect(self, kind: type[Result], number: int = 1) -> Any:
        """Wait for the `number`-th result of a kind and return it."""
        found = lambda: [result for result in self.results if isinstance(result, kind)]  # noqa: E731
        wait_until(lambda: len(found()) >= number, 10.0, lambda: self.results)
        return found()[number - 1]

    def store(self, entry: int, offset: int, nbytes: int, codec: str = "ancf") -> None:
        """Hand over the range as a store whose sequence number is its entry."""
        promised = blob_bound(nbytes)
        assert self.space.promise(promised)
        dtype = parse_dtype("bfloat16", nbytes)
        self.lane.store(
            StoreJob(SESSION, entry, 0, offset, nbytes, dtype, codec, entry, promised, self.space)
        )

    def restore(self, ticket: int, block: Any, offset: int, nbytes: int) -> None:
        self.lane.restore(RestoreJob(SESSION, ticket, 1, block, 0, offset, nbytes, ticket))

    def publish(self, value: int) -> None:
        self.counters.store(PUBLISHED, value)

    def end(self) -> None:
        self.lane.detach(SESSION)
        self.expect(Detached)
        self.memory = None
        self.area.close()
        self._page.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name, module in fake_cuda.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in LANE_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    from stormd.lanes.cuda import CudaLane

    pool = HostPool(4 * MIB)
    space, results = Space(pool.nbytes), []
    lane = CudaLane([0], pool=pool, post=results.append, staging_bytes=MIB, part_bytes=PART)
    bench = Bench(lane, pool, space, results)
    wait_until(lambda: fake_cuda.CudaCodec.prepared >= set(ancf.DType))
    yield bench
    if not any(isinstance(result, Detached) for result in results):
        bench.end()
    assert lane.close(10.0)
    space.assert_invariants()
    pool.close()
    assert not fake_cuda.live
    for name in LANE_MODULES:
        sys.modules.pop(name, None)


def hello(uuid: str = fake_cuda.UUID) -> Hello:
    return Hello(1, [], os.getpid(), os.getuid(), "cuda", uuid, ["cuda_ipc"], 0, "test")


def offer(area: fake_cuda.DeviceBuffer, nbytes: int | None = None) -> MapSegment:
    return MapSegment(0, area.ipc_handle(), 1, area.nbytes if nbytes is None else nbytes)


def fill(bench: Bench, seed: int = 0) -> np.ndarray:
    """Fill the staging area with bfloat16 N(0,1) and return a copy."""
    values = np.random.default_rng(seed).standard_normal(MIB // 2).astype(np.float32)
    bench.memory[:] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return bench.memory.copy()


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
    assert bench.counters.read(RESTORED) == 16
    for entry in blocks:
        begin, end = (entry - 1) * PART, entry * PART - 2 * entry
        assert np.array_equal(bench.memory[begin:end], before[begin:end])
        assert (bench.memory[end : entry * PART] == 0xA5).all()
    for block in blocks.values():
        bench.space.release(block)


def test_modes_and_sizes_are_reported(bench: Bench) -> None:
    bench.map()
    fill(bench)
    bench.store(1, 0, PART, "raw")
    bench.store(2, 0, PART, "ancf")
    bench.publish(2)
    raw, coded = bench.expect(StoreDone, 1), bench.expect(StoreDone, 2)
    assert (raw.mode, raw.block.nbytes) == ("raw", blob_bound(PART))
    assert coded.mode == "window"
    assert coded.block.nbytes < PART / 1.3
    bench.space.release(raw.block)
    bench.space.release(coded.block)


def test_nothing_is_read_before_it_is_published(bench: Bench) -> None:
    bench.map()
    bench.memory[:] = 0
    bench.store(1, 0, PART)
    bench.store(2, PART, PART)
    bench.publish(1)
    first = bench.expect(StoreDone)
    assert bench.counters.read(STORED) == 1
    before = fill(bench)  # as if the client's copy came only now
    bench.publish(2)
    second = bench.expect(StoreDone, 2)
    bench.restore(3, second.block, 0, PART)
    bench.publish(3)
    bench.expect(RestoreDone)
    assert np.array_equal(bench.memory[:PART], before[PART : 2 * PART])
    bench.space.release(first.block)
    bench.space.release(second.block)


def test_a_destination_is_written_only_once_it_is_published(bench: Bench) -> None:
    bench.map()
    fill(bench)
    bench.store(1, 0, PART)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    bench.memory[:] = 0x77
    bench.restore(2, block, 0, PART)
    bench.store(3, 2 * PART, PART)  # the other direction goes on meanwhile
    assert (bench.memory[:PART] == 0x77).all()
    bench.publish(3)
    bench.expect(RestoreDone)
    other = bench.expect(StoreDone, 2).block
    bench.space.release(block)
    bench.space.release(other)


def test_a_rejected_store_is_passed_over(bench: Bench) -> None:
    bench.map()
    bench.lane.skip(SESSION, 5)
    wait_until(lambda: bench.counters.read(STORED) == 5)


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
    bench.space.release(done.block)


def test_what_is_compiled_for_dense_tensors_only_is_stored_as_one(bench: Bench) -> None:
    bench.map()
    bench.memory[:] = 0
    ready = next(iter(bench.lane._devices.values())).codec._ready
    wait_until(lambda: ready.get(ancf.DType.BFLOAT16) == "auto")
    for entry, (mode, found) in enumerate((("window", "window"), ("auto", "constant")), 1):
        ready[ancf.DType.BFLOAT16] = mode
        bench.store(entry, 0, PART)
        bench.publish(entry)
        done = bench.expect(StoreDone, entry)
        assert done.mode == found
        bench.space.release(done.block)


def test_a_header_without_a_type_is_corrupt(bench: Bench) -> None:
    bench.map()
    bench.store(1, 0, PART)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    ctypes.c_uint8.from_address(bench.pool.address + block.extents[0].offset + 7).value = 250
    bench.restore(2, block, 0, PART)
    bench.publish(2)
    assert bench.expect(RestoreFailed).kind == "CorruptBlob"
    bench.space.release(block)


def test_a_gpu_that_is_not_served_is_refused_by_name(bench: Bench) -> None:
    with pytest.raises(LaneUnavailable, match=f"does not serve the GPU abc, only {fake_cuda.UUID}"):
        bench.lane.attach(99, hello("abc"))


def test_a_segment_larger_than_its_handle_is_refused(bench: Bench) -> None:
    bench.lane.map_segment(SESSION, offer(bench.area, bench.area.nbytes + 1))
    assert "1048576 bytes, not 1048577" in bench.expect(SegmentRefused).detail


def test_a_bad_handle_is_refused(bench: Bench) -> None:
    bench.lane.map_segment(SESSION, MapSegment(0, b"x" * 64, 1, 8))
    assert "CUDA_ERROR_INVALID_VALUE" in bench.expect(SegmentRefused).detail


def test_an_encoder_that_fails_costs_its_own_store_only(bench: Bench) -> None:
    bench.map()
    fill(bench)
    fake_cuda.CudaCodec.broken = True
    bench.store(1, 0, PART)
    bench.store(2, 0, PART)
    bench.publish(2)
    assert "does not start" in bench.expect(StoreFailed).detail
    bench.space.release(bench.expect(StoreDone).block)
    bench.space.withdraw(blob_bound(PART))
    wait_until(lambda: bench.counters.read(STORED) == 2)


def test_a_damaged_blob_is_never_called_restored(bench: Bench) -> None:
    bench.map()
    fill(bench)
    bench.store(1, 0, PART)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    flipped = ctypes.c_uint8.from_address(bench.pool.address + block.extents[0].offset + 4000)
    flipped.value ^= 0x10
    bench.restore(2, block, 0, PART)
    bench.publish(2)
    failed = bench.expect(RestoreFailed)
    assert (failed.kind, failed.ticket) == ("CorruptBlob", 2)
    assert "damage number 7" in failed.detail
    bench.space.release(block)


def test_a_dead_clients_waits_are_released_and_every_job_answered(bench: Bench) -> None:
    bench.map()
    for entry in range(1, 9):
        bench.store(entry, 0, PART)
    bench.end()
    answered = [r.entry for r in bench.results if isinstance(r, StoreDone | StoreFailed)]
    assert answered == list(range(1, 9))
    for result in bench.results:
        if isinstance(result, StoreDone):
            bench.space.release(result.block)
        elif isinstance(result, StoreFailed):
            bench.space.withdraw(blob_bound(PART))


def test_a_write_that_undoes_the_poison_does_not_keep_a_dead_session(bench: Bench) -> None:
    bench.map()
    bench.store(1, 0, PART)
    session = bench.lane._sessions[SESSION]
    wait_until(lambda: session.stores._free.qsize() == 9)  # of 10: the job has begun
    real = session._timelines
    poison: Callable[..., None] = real.poison
    undone = iter([True])

    def poison_once_in_vain(*counters: int) -> None:
        if next(undone, None):
            return
        poison(*counters)

    real.poison = poison_once_in_vain
    bench.end()
    bench.space.release(bench.expect(StoreDone).block)


def test_an_unmapped_segment_is_let_go_after_its_jobs(bench: Bench) -> None:
    bench.map()
    fill(bench)
    bench.store(1, 0, PART)
    bench.lane.unmap_segment(SESSION, 0)
    bench.publish(1)
    bench.space.release(bench.expect(StoreDone).block)
    wait_until(lambda: not any(isinstance(o, fake_cuda.IpcMapping) for o in fake_cuda.live))


def test_what_crosses_the_link_is_counted_by_direction(bench: Bench) -> None:
    bench.map()
    fill(bench)
    (link,) = bench.lane.links
    assert (link.device, link.uuid) == ("cuda:0", fake_cuda.UUID)
    bench.store(1, 0, PART)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    assert link.as_status()["store"]["bytes"] == block.nbytes
    assert link.as_status()["restore"]["bytes"] == 0
    bench.restore(2, block, PART, PART)
    bench.publish(2)
    bench.expect(RestoreDone)
    assert link.as_status()["restore"]["bytes"] == block.nbytes
    bench.space.release(block)


def test_a_profiler_is_told_of_each_entry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []

    def span(what: str, nbytes: int, number: int) -> nullcontext[None]:
        told.append((what, nbytes, number))
        return nullcontext()

    monkeypatch.setattr(sys.modules["stormd.lanes.cuda_session"], "span", span)
    bench.map()
    fill(bench)
    bench.store(7, 0, PART)
    bench.publish(7)
    block = bench.expect(StoreDone).block
    bench.restore(8, block, PART, PART)
    bench.publish(8)
    bench.expect(RestoreDone)
    assert told[:2] == [("encode", PART, 7), ("copy down", block.nbytes, 7)]
    assert [one[0] for one in told[2:]] == ["copy up", "decode"]
    bench.space.release(block)
