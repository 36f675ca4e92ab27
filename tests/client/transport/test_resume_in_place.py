"""Tensors that the daemon uses where they lie outlive it: the bits are right whatever it was doing.

The daemon is a process that is killed at random moments; client and daemon have lanes with the
orderings of a device (`support.device_client`, `support.device_lane`).
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from support.chains import chain, gradient, leaf
from support.daemon_process import served_by
from support.device_client import DeviceClientLane
from support.other_lanes import daemon_with_lane, end
from support.waiting import wait_until

TRAINERS = 2
KILLS = 4
RESTARTS = 1
LONGEST_PAUSE = 0.3
"""Seconds that a daemon has served when it is ended: within the first tenth its clients come."""

FLAGS = [
    "--device=cpu", "--resumable", "--resume-seconds=120", "--pool-bytes=256MiB",
    "--cache-bytes=1MiB", "--staging-bytes-cpu=64MiB", "--part-bytes-cpu=256KiB",
]  # fmt: skip


@pytest.fixture
def lane_kind() -> type[DeviceClientLane]:
    return DeviceClientLane


@pytest.fixture
def daemon() -> Iterator[ChildDaemon]:
    with daemon_with_lane("device_daemon", FLAGS) as child:
        yield child


def train(address: str, is_over: threading.Event) -> int:
    """Take steps until it is over; return how many there were, each of which was right."""
    x, steps = leaf(), 0
    expected = gradient(chain(x, 8), x)
    with storm.connect(address, embedded="never", timeout=60) as client:
        offload = client.offload(min_bytes=1)
        while not is_over.is_set() or not steps:
            with offload:
                loss = chain(x, 8)
            loss.backward()
            assert torch.equal(x.grad, expected), f"step {steps} is wrong"
            x.grad = None
            del loss
            steps += 1
    return steps


def end_daemons(
    daemon: ChildDaemon, kills: int, restarts: int, seed: int, longest: float = LONGEST_PAUSE
) -> int:
    """End the daemon of two trainers, so many times; return how many steps were right."""
    moments, is_over = random.Random(seed), threading.Event()
    ends = [signal.SIGKILL] * kills + [signal.SIGUSR2] * restarts
    moments.shuffle(ends)
    with ThreadPoolExecutor(TRAINERS) as pool:
        running = [pool.submit(train, daemon.address, is_over) for _ in range(TRAINERS)]
        try:
            # Who has yet to connect is told of a daemon that ends, and gives up.
            wait_until(lambda: len(daemon.status()["sessions"]) == TRAINERS, 60.0, daemon.status)
            for number in ends:
                pid = served_by(daemon)
                time.sleep(moments.random() * longest)
                end(pid, number)
        finally:
            is_over.set()
        return sum(one.result() for one in running)


def test_steps_go_on_whenever_the_daemon_ends(
    daemon: ChildDaemon, lanes: list[DeviceClientLane]
) -> None:
    assert end_daemons(daemon, KILLS, RESTARTS, seed=1) >= TRAINERS
    assert not any(lane.done_twice for lane in lanes)
    ways = [lane.in_place for lane in lanes]
    assert sum(way.handed_out for way in ways if way is not None)
    wait_until(lambda: not daemon.status()["sessions"], 60.0, daemon.status)
    pool = daemon.status()["pool"]
    assert (pool["used_bytes"], pool["promised_bytes"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_steps_go_on_for_long(daemon: ChildDaemon, lanes: list[DeviceClientLane]) -> None:
    # After 20 in a row that have served for less than half a second none is started any more.
    end_daemons(daemon, 200, 50, seed=2, longest=1.0)
    assert not any(lane.done_twice for lane in lanes)
    outcomes = [said for lane in lanes if lane.in_place for said in lane.in_place.outcomes]
    assert {0, None} <= set(outcomes)  # some were done already, and some were not
