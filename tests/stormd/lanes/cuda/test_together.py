"""Small parts that the cuda lane takes together."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.cuda_bench import PART, SESSION, Bench, fill, prompt_and_late
from support.waiting import wait_until

from stormd.ledger.events import RestoreDone, RestoreFailed, StoreDone
from stormd.protocol.timeline import STORED

SMALL = tuple(PART // 8 - 2 * n for n in range(8))
"""Sizes of parts that fit into one scratch."""


@contextmanager
def waiting_together(pipeline: Any) -> Iterator[list[int]]:
    """Have the jobs put inside found together; yield how many each batch begins with."""
    ready, batches, begin = threading.Event(), [], pipeline._stages.begin

    def noting(batch: list[Any], scratch: Any) -> None:
        begin(batch, scratch)
        batches.append(len(batch))

    pipeline._stages.begin = noting
    pipeline.run(lambda: ready.wait(10.0) and None)
    yield batches
    ready.set()


def stored_together(bench: Bench, published: int) -> list[Any]:
    """Store small parts, `published` of them ready, and return where they are."""
    with waiting_together(bench.lane._sessions[SESSION].stores) as batches:
        for entry, nbytes in enumerate(SMALL, 1):
            bench.store(entry, (entry - 1) * PART, nbytes)
        bench.publish(published)
    wait_until(lambda: bench.counters.read(STORED) >= published)
    bench.publish(len(SMALL))
    bench.expect(StoreDone, len(SMALL))
    assert batches == [some for some in (published, len(SMALL) - published) if some]
    assert bench.counters.read(STORED) == len(SMALL)
    done = [result for result in bench.results if isinstance(result, StoreDone)]
    assert [one.entry for one in done] == list(range(1, 9))
    return [one.block for one in done]


def restore_at_once(
    bench: Bench, blocks: Sequence[Any], sizes: Sequence[int], *, by_one_number: bool = True
) -> list[int]:
    """Ask for parts back that are found together, by the last of the numbers that they may have."""
    bench.memory[:] = 0xA5
    last = 2 * len(sizes) if by_one_number else None
    with waiting_together(bench.lane._sessions[SESSION].restores) as batches:
        for index, (block, nbytes) in enumerate(zip(blocks, sizes, strict=True)):
            ticket = len(sizes) + 1 + index
            bench.restore(ticket, block, index * PART, nbytes, sequence=last)
    return batches


def assert_back(bench: Bench, before: np.ndarray, sizes: Sequence[int]) -> None:
    """Check that parts of these sizes are where they were, and nothing else was written."""
    for index, nbytes in enumerate(sizes):
        begin, end = index * PART, index * PART + nbytes
        assert np.array_equal(bench.memory[begin:end], before[begin:end])
        assert (bench.memory[end : (index + 1) * PART] == 0xA5).all()


@prompt_and_late
def test_small_parts_go_and_come_together(bench: Bench) -> None:
    bench.map()
    before = fill(bench)
    blocks = stored_together(bench, published=3)
    batches = restore_at_once(bench, blocks, SMALL)
    wait_until(lambda: batches == [len(SMALL)])
    assert (bench.memory == 0xA5).all()
    bench.publish(16)
    bench.expect(RestoreDone, len(SMALL))
    assert_back(bench, before, SMALL)
    (link,) = bench.lane.links
    total = sum(block.nbytes for block in blocks)
    assert [link.as_status()[one]["bytes"] for one in ("store", "restore")] == [total, total]


@pytest.mark.parametrize("place", [7, 4000])  # of the element type, which is looked at first
def test_a_damaged_blob_among_others_fails_alone(bench: Bench, place: int) -> None:
    bench.map()
    before = fill(bench)
    blocks = stored_together(bench, len(SMALL))
    damaged = ctypes.c_uint8.from_address(bench.pool.address + blocks[2].extents[0].offset + place)
    damaged.value ^= 0xF0
    restore_at_once(bench, blocks, SMALL)
    bench.publish(16)
    failed = bench.expect(RestoreFailed)
    assert (failed.kind, failed.ticket) == ("CorruptBlob", 11)
    bench.expect(RestoreDone, len(SMALL) - 1)
    for index, nbytes in enumerate(SMALL):
        begin, end = index * PART, index * PART + nbytes
        assert index == 2 or np.array_equal(bench.memory[begin:end], before[begin:end])


@pytest.mark.parametrize("published", [0, 2])
def test_a_client_may_wait_for_what_comes_first_before_more_may_be_written(
    bench: Bench, published: int
) -> None:
    """Its stream waits for each, and only then comes to the number of the next."""
    bench.map()
    before = fill(bench)
    blocks = stored_together(bench, len(SMALL))
    bench.publish(len(SMALL) + published)
    batches = restore_at_once(bench, blocks, SMALL, by_one_number=False)
    for count in range(max(published, 1), len(SMALL) + 1):
        bench.publish(len(SMALL) + count)
        bench.expect(RestoreDone, count)
    assert batches[0] == max(published, 1)
    assert_back(bench, before, SMALL)


def test_a_source_is_not_read_again_once_it_counts_as_read(bench: Bench) -> None:
    """Though the batch right behind it cannot be begun, and its jobs are tried again alone."""
    bench.map()
    before = fill(bench)
    fake_cuda.CudaCodec.broken = 1
    bench.publish(1)
    with waiting_together(bench.lane._sessions[SESSION].stores) as batches:
        for entry in (1, 2, 3):
            bench.store(entry, (entry - 1) * PART, SMALL[entry])
    wait_until(lambda: bench.counters.read(STORED) == 1)
    bench.memory[:PART] = 0x5A  # its client uses the memory for something else
    bench.publish(3)
    bench.expect(StoreDone, 3)
    assert fake_cuda.CudaCodec.broken is None
    assert batches == [1, 1, 1]
    assert bench.counters.read(STORED) == 3
    blocks = {one.entry: one.block for one in bench.results if isinstance(one, StoreDone)}
    for number, (entry, block) in enumerate(blocks.items(), 1):
        bench.restore(3 + entry, block, 8 * PART, SMALL[entry])
        bench.publish(3 + entry)
        bench.expect(RestoreDone, number)
        begin = (entry - 1) * PART
        restored = bench.memory[8 * PART : 8 * PART + SMALL[entry]]
        assert np.array_equal(restored, before[begin : begin + SMALL[entry]])


@prompt_and_late
@pytest.mark.parametrize("seed", range(2))
def test_parts_of_all_sizes_share_the_scratch(bench: Bench, seed: int) -> None:
    """More of them than it has room for, both ways."""
    bench.map()
    before = fill(bench, seed)
    random = np.random.default_rng(seed)
    sizes = [PART, PART, PART, 2]
    sizes += [2 * int(n) for n in random.integers(1, PART // 2, len(before) // PART - 4)]
    random.shuffle(sizes)
    bench.publish(2 * len(sizes))
    with waiting_together(bench.lane._sessions[SESSION].stores):
        for entry, nbytes in enumerate(sizes, 1):
            bench.store(entry, (entry - 1) * PART, nbytes)
    bench.expect(StoreDone, len(sizes))
    done = [result for result in bench.results if isinstance(result, StoreDone)]
    blocks = [result.block for result in done]
    restore_at_once(bench, blocks, sizes)
    bench.expect(RestoreDone, len(sizes))
    assert_back(bench, before, sizes)
