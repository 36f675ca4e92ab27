"""A device may have fewer queues than there are streams: then one that waits holds others up.

So no stream of the daemon's waits for a client. Here all of them share one queue.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support import fake_cuda
from support.cuda_bench import PART, SESSION, Bench, fill
from support.waiting import wait_until

from stormd.ledger.events import RestoreDone, StoreDone


@pytest.fixture(autouse=True)
def one_queue(bench: Bench) -> Iterator[None]:
    """Have all streams that the daemon uses wait in one line."""
    with fake_cuda.entered(0):
        fake_cuda.Stream.line = fake_cuda.Stream()
    yield
    bench.end()
    line, fake_cuda.Stream.line = fake_cuda.Stream.line, None
    line.close()


def test_a_store_passes_a_restore_that_may_not_be_written_yet(bench: Bench) -> None:
    """Its client may have to see the store read before it comes so far."""
    bench.map()
    before = fill(bench)
    bench.store(1, 0, PART)
    bench.publish(1)
    block = bench.expect(StoreDone).block
    bench.restore(3, block, 4 * PART, PART)
    wait_until(lambda: bench.lane._sessions[SESSION].restores._begun)
    bench.store(2, PART, PART)
    bench.publish(2)
    bench.expect(StoreDone, 2)
    bench.publish(3)
    bench.expect(RestoreDone)
    assert np.array_equal(bench.memory[4 * PART : 5 * PART], before[:PART])


def test_a_session_passes_another_one_that_waits(bench: Bench) -> None:
    bench.map()
    fill(bench)
    bench.store(1, 0, PART)
    other = Bench(bench.lane, bench.pool, bench.space, bench.results, session=SESSION + 1)
    other.map()
    other.store(1, 0, PART)
    other.publish(1)
    block = bench.expect(StoreDone).block
    other.restore(2, block, PART, PART)
    other.publish(2)
    bench.expect(RestoreDone)
    other.end()
    bench.publish(1)
    bench.expect(StoreDone, 2)
