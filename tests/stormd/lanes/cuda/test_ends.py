"""What the cuda lane leaves when clients, their memory or a device end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support import fake_cuda
from support.cuda_bench import PART, SESSION, Bench, fill, held, held_back, offer, prompt_and_late
from support.waiting import wait_until

from stormd.ledger.events import (
    Detached,
    RestoreDone,
    RestoreFailed,
    SegmentMapped,
    SegmentRefused,
    StoreDone,
    StoreFailed,
)
from stormd.monitoring.health import stuck_workers
from stormd.protocol import MapSegment


def test_a_dead_clients_waits_are_released_and_every_job_answered(bench: Bench) -> None:
    bench.map()
    for entry in range(1, 9):
        bench.store(entry, 0, PART)
    bench.end()
    answered = [r.entry for r in bench.results if isinstance(r, StoreDone | StoreFailed)]
    assert sorted(answered) == list(range(1, 9))  # those begun may be answered after the others


def test_a_write_that_undoes_the_poison_does_not_keep_a_dead_session(bench: Bench) -> None:
    bench.map()
    bench.store(1, 0, PART)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    bench.restore(2, block, 0, PART)
    session = bench.lane._sessions[SESSION]
    wait_until(lambda: session.restores._begun)
    real = session._client.timelines
    poison: Callable[..., None] = real.poison
    undone = iter([True])

    def poison_once_in_vain(*counters: int) -> None:
        if next(undone, None):
            return
        poison(*counters)

    real.poison = poison_once_in_vain
    bench.end()
    bench.expect(RestoreDone)


def test_a_session_that_finds_no_memory_holds_none(bench: Bench) -> None:
    with fake_cuda.entered(0):
        before = set(fake_cuda.live)
    fake_cuda.MappedHost.refused = True
    bench.lane.map_segment(SESSION, offer(bench.area))
    detail = bench.expect(SegmentRefused).detail
    assert "CUDA_ERROR_OUT_OF_MEMORY" in detail
    assert "part_bytes_cuda of less than 64.0 KiB" in detail
    assert not [type(one).__name__ for one in fake_cuda.live - before]


def test_a_broken_device_leaves_no_job_unanswered(bench: Bench) -> None:
    bench.map()
    fill(bench)
    bench.store(1, 0, PART)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    bench.store(2, PART, PART)
    wait_until(lambda: bench.lane._sessions[SESSION].stores._pending)
    fake_cuda.fault(0, "an illegal address")
    bench.store(3, 2 * PART, PART)
    bench.restore(4, block, 0, PART)
    bench.publish(4)
    assert [bench.expect(StoreFailed, number).entry for number in (1, 2)] == [2, 3]
    assert bench.expect(RestoreFailed).kind == "ActivationLost"
    bench.lane.map_segment(SESSION, MapSegment(segment=1, handle=b"x" * 64, nbytes=8))
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in bench.expect(SegmentRefused).detail
    bench.lane.detach(SESSION)
    bench.expect(Detached)
    (trouble,) = stuck_workers(bench.lane.heartbeats)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in trouble  # for whoever can start the daemon again
    assert bench.lane.close(10.0)
    fake_cuda.repair()
    bench.end_client()


def mapped_memory(bench: Bench, first: int) -> list[fake_cuda.DeviceBuffer]:
    """Map eight allocations of a client as segments from `first` on."""
    memory = []
    for segment in range(first, first + 8):
        with fake_cuda.entered(0):
            memory.append(fake_cuda.DeviceBuffer(PART))
        bench.lane.map_segment(
            SESSION, MapSegment(segment=segment, handle=memory[-1].ipc_handle(), nbytes=PART)
        )
        bench.expect(SegmentMapped, segment + 1)
    return memory


@prompt_and_late
@pytest.mark.parametrize("seed", range(2))
def test_allocations_come_and_go_under_what_uses_them(bench: Bench, seed: int) -> None:
    """A client may free what the daemon has yet to read, and unmap what it has yet to use."""
    chance = random.Random(seed)
    bench.map()
    sizes = [chance.choice((PART, PART // 3 // 2 * 2, 700)) for _ in range(8)]
    plain = [chance.randbytes(nbytes) for nbytes in sizes]
    for entry, memory in enumerate(mapped_memory(bench, 1), 1):
        memory._bytes[: sizes[entry - 1]] = plain[entry - 1]
        bench.store(entry, 0, sizes[entry - 1], segment=entry)
        bench.lane.unmap_segment(SESSION, entry)
        with fake_cuda.entered(0):
            memory.close()
        if chance.random() < 0.5:
            bench.publish(entry)
    bench.publish(8)
    blocks = [bench.expect(StoreDone, number).block for number in range(1, 9)]
    targets = mapped_memory(bench, 9)
    for index, (block, nbytes) in enumerate(zip(blocks, sizes, strict=True)):
        bench.restore(9 + index, block, 0, nbytes, segment=9 + index)
        bench.lane.unmap_segment(SESSION, 9 + index)
        if chance.random() < 0.5:
            bench.publish(9 + index)
    bench.publish(17)
    bench.expect(RestoreDone, 8)
    for memory, expected in zip(targets, plain, strict=True):
        assert bytes(memory._bytes[: len(expected)]) == expected
        with fake_cuda.entered(0):
            memory.close()


def test_a_device_that_nobody_uses_is_seen_to_break(bench: Bench) -> None:
    """As under MPS, by a process that was killed; a worker that says so is started again."""
    bench.end()
    assert (bench.lane.fault, stuck_workers(bench.lane.heartbeats)) == ("", [])
    fake_cuda.fault(0, "an unspecified launch failure")
    wait_until(lambda: bench.lane.fault)
    assert "unspecified launch failure" in bench.lane.fault
    (trouble,) = stuck_workers(bench.lane.heartbeats)
    assert "unspecified launch failure" in trouble
    fake_cuda.repair()


def test_a_copy_that_does_not_end_is_seen_and_a_client_that_waits_is_not(bench: Bench) -> None:
    def troubles() -> list[str]:
        return [one.trouble(0.0) for one in bench.lane.heartbeats if one.trouble(0.0)]

    bench.map()
    fill(bench)
    bench.store(1, 0, PART)
    wait_until(lambda: bench.lane._sessions[SESSION].stores._pending)
    wait_until(lambda: not troubles())
    with held(next(iter(bench.lane._devices.values())).down):
        bench.publish(1)
        wait_until(lambda: any("at one job" in one for one in troubles()))
    bench.expect(StoreDone)
    wait_until(lambda: not troubles())


@pytest.mark.parametrize("breaks", ["is_due", "settle"])
def test_a_thread_that_breaks_answers_all_there_is_and_all_that_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    def fails(*_: object) -> None:
        raise SystemExit("no more")

    bench.map()
    fill(bench)
    stores = bench.lane._sessions[SESSION].stores
    bench.publish(1)
    with held_back(bench):
        bench.store(1, 0, PART)
        wait_until(lambda: stores._begun)
        fake_cuda.CudaCodec.broken = 0  # what cannot be begun has the device settled
        monkeypatch.setattr(stores._stages, breaks, fails)
        for entry in range(2, 5):
            bench.store(entry, 0, PART)
        bench.publish(4)
    failed = {bench.expect(StoreFailed, number).entry for number in range(1, 5)}
    bench.store(5, 0, PART)
    failed.add(bench.expect(StoreFailed, 5).entry)
    assert failed == {1, 2, 3, 4, 5}
    assert any("has ended: SystemExit: no more" in one.trouble() for one in bench.lane.heartbeats)
    fake_cuda.CudaCodec.broken = None
