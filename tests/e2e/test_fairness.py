"""Two clients of one daemon, one with large tensors and one with small ones: both move as much."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import pytest
import storm_client as storm
import torch
from support.chains import chain, gradient
from support.daemon_thread import DaemonThread
from support.waiting import wait_until
from torch import Tensor

from stormd.config import Config
from stormd.lanes.cpu import CpuLane
from stormd.lanes.host_codec import HostCodec
from stormd.ledger.events import StoreJob
from stormd.memory.arena import Block

KIB = 1 << 10
WAIT_SECONDS = 60.0
EACH_BYTES = 16 << 20


def saved(client: storm.Client, nbytes: int) -> tuple[Tensor, Tensor]:
    """Return a loss whose graph has stored tensors of so many bytes each, and its leaf."""
    x = torch.randn(nbytes // 4).requires_grad_()
    with client.offload(min_bytes=1, codec="raw", replay=False):
        return chain(x, EACH_BYTES // nbytes), x


def test_large_and_small_tensors_move_alike(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While both have work; by turns of one tensor each it would be eight times as much."""
    go_on, stored = threading.Event(), list[StoreJob]()
    store = HostCodec.store

    def late(codec: HostCodec, source: int, job: StoreJob) -> tuple[Block, str]:
        assert go_on.wait(WAIT_SECONDS)
        stored.append(job)
        return store(codec, source, job)

    monkeypatch.setattr(HostCodec, "store", late)
    config = Config(
        address=f"ipc://{place}/sock",
        device="cpu",
        pool_bytes=256 << 20,
        cache_bytes=1 << 20,
        encode_threads=1,
    )
    daemon = DaemonThread(config)
    try:
        clients = [storm.connect(daemon.address, embedded="never") for _ in range(2)]
        with clients[0], clients[1], ThreadPoolExecutor(2) as threads:
            sizes = (1024 * KIB, 128 * KIB)  # both above what the loop does itself
            graphs = list(threads.map(saved, clients, sizes))
            wait_until(lambda: all_wait(daemon, EACH_BYTES * 3 // 4), WAIT_SECONDS)
            go_on.set()
            for loss, x in graphs:
                found = gradient(loss, x)
                assert torch.equal(found, gradient(chain(x, EACH_BYTES // x.nbytes), x))
            del graphs, loss
    finally:
        go_on.set()
        daemon.stop()
    assert_alike(stored)


def all_wait(daemon: DaemonThread, nbytes: int) -> bool:
    """Tell whether of both sessions stores of so many bytes wait for the lane."""
    lane = daemon.server._lanes["cpu"]
    assert isinstance(lane, CpuLane)
    with lane._queue._changed:
        waiting = [sum(size for _, size in jobs) for jobs in lane._queue._waiting.values()]
    return len(waiting) == 2 and min(waiting) >= nbytes


def assert_alike(stored: list[StoreJob]) -> None:
    """Compare what both have moved at each moment from the second MiB until one has nothing."""
    totals = Counter[int]()
    for job in stored:
        totals[job.session] += job.nbytes
    first, second = totals
    moved = [
        list(accumulate(job.nbytes if job.session == one else 0 for job in stored))
        for one in (first, second)
    ]
    both = [
        (a, b)
        for a, b in zip(*moved, strict=True)
        if 2 << 20 < a < totals[first] and 2 << 20 < b < totals[second]
    ]
    assert both, "one had nothing before the other began"
    assert all(1 / 3 < a / b < 3 for a, b in both), both
