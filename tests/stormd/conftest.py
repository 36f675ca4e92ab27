"""Daemons and raw clients for the tests of the daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient

from stormd.config import Config

MIB = 1 << 20


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """Return a maker of small configs with an address of the test's own."""

    def make(**changes: Any) -> Config:
        fields: dict[str, Any] = {
            "address": f"ipc://{tmp_path}/stormd.sock",
            "pool_bytes": 16 * MIB,
            "cache_bytes": 4 * MIB,
            "device": "cpu",
            "staging_bytes_cpu": 4 * MIB,
            "part_bytes_cpu": MIB,
            "encode_threads": 2,
            "shutdown_seconds": 2.0,
        }
        return Config(**{**fields, **changes})

    return make


@pytest.fixture
def make_daemon(make_config: Callable[..., Config]) -> Iterator[Callable[..., DaemonThread]]:
    """Return a maker of daemons; afterwards each has ended, and held nothing before it did."""
    daemons: list[DaemonThread] = []

    def make(**changes: Any) -> DaemonThread:
        daemons.append(DaemonThread(make_config(**changes)))
        return daemons[-1]

    yield make
    for daemon in daemons:
        if daemon.is_alive:
            daemon.wait_until_empty()
        daemon.stop()


@pytest.fixture
def ticks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have daemons look after files, devices and clients more often than twice a second."""
    monkeypatch.setattr("stormd.server.TICK_SECONDS", 0.02)


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonThread]) -> DaemonThread:
    return make_daemon()


@pytest.fixture
def connect() -> Iterator[Callable[..., RawClient]]:
    """Return a maker of raw clients without a session; they vanish after the test."""
    clients: list[RawClient] = []

    def make(daemon: DaemonThread, **options: int | bytes) -> RawClient:
        clients.append(RawClient(daemon.address, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(daemon: DaemonThread, connect: Callable[..., RawClient]) -> RawClient:
    """Return a client with a session of the `daemon` fixture."""
    return connect(daemon).open()
