"""Stuck and ended workers are named, idle ones are not."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient
from support.waiting import wait_until

from stormd.lanes.cpu import AT_ONCE_BYTES
from stormd.lanes.host_codec import HostCodec
from stormd.monitoring.health import Heartbeat, stuck_workers
from stormd.protocol import Failed, Stored


def test_a_worker_of_a_real_daemon_that_hangs_is_named(
    daemon: DaemonThread, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    store = HostCodec.store

    def hang(self: HostCodec, *arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return store(self, *arguments)

    def named() -> list[str]:
        heartbeats = [
            heartbeat for lane in daemon.server._lanes.values() for heartbeat in lane.heartbeats
        ]
        return stuck_workers(heartbeats, limit_seconds=0.0)

    monkeypatch.setattr(HostCodec, "store", hang)
    entry = client.store(b"x" * (AT_ONCE_BYTES + 1))
    assert entered.wait(60)
    try:
        wait_until(named)
        (trouble,) = named()
        assert re.match(r"stormd-cpu-[01] has been at one job", trouble)
        assert daemon.on_loop(daemon.server.stuck) == []  # far below the daemon's own limit
    finally:
        go_on.set()
    client.wait_for(Stored, entry=entry)
    wait_until(lambda: named() == [], found=named)


def test_a_worker_that_goes_on_once_its_process_is_no_longer_stopped_is_not_named() -> None:
    """It is late when it is looked at, and then at another job."""
    heartbeat = Heartbeat("worker")
    for _ in range(2):
        heartbeat.work()
        assert stuck_workers([heartbeat], limit_seconds=0.0) == []
    wait_until(lambda: stuck_workers([heartbeat], limit_seconds=0.0))
    heartbeat.work()
    assert stuck_workers([heartbeat], limit_seconds=0.0) == []


def test_workers_whose_threads_die_are_named_and_the_rest_goes_on(
    make_daemon: Callable[..., DaemonThread],
    connect: Callable[..., RawClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, dying = HostCodec.store, [True]

    def end(self: HostCodec, *arguments: Any) -> Any:
        if dying:
            dying.pop()
            raise SystemExit("no scratch")
        return store(self, *arguments)

    monkeypatch.setattr(HostCodec, "store", end)
    daemon = make_daemon(encode_threads=2)
    client, data = connect(daemon).open(), b"x" * (AT_ONCE_BYTES + 1)
    for left in (1, 0):
        lost = client.wait_for(Failed, entry=client.store(data))
        assert lost.kind == "ActivationLost"
        assert "a worker of the daemon has ended (SystemExit)" in lost.detail
        wait_until(lambda left=left: len(daemon.server.stuck()) == 2 - left, found=daemon.status)  # type: ignore[misc]
        if left:
            client.stored(data)
            dying.append(True)
    assert all("has ended: SystemExit: no scratch" in one for one in daemon.server.stuck())
    client.wait_for(Failed, entry=client.store(data))
    assert "workers have ended" in connect(daemon).hello().detail
