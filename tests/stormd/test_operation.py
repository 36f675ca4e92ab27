"""The order of what an operator's tools are told, and that nothing outlives the daemon."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stormd.config import Config
from stormd.notify import Notifier
from stormd.running import StartReport, reload_settings


class FakeServer:
    """A daemon that takes settings."""

    taken: Config | None = None

    def reload(self, config: Config) -> list[str]:
        self.taken = config
        return ["pool_bytes"]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        yield end


@pytest.fixture
def notifier(manager: socket.socket) -> Iterator[Notifier]:
    with Notifier(manager.getsockname()) as made:
        yield made


def said(manager: socket.socket) -> list[str]:
    """Return the first line of each datagram that waits."""
    lines = []
    while True:
        try:
            lines.append(manager.recv(4096).decode().split("\n")[0])
        except BlockingIOError:
            return lines


def test_reload_takes_settings_and_level(manager: socket.socket, notifier: Notifier) -> None:
    server, level = FakeServer(), logging.getLogger("stormd").level
    read = Config(log_level="error")
    try:
        reload_settings(server, notifier, lambda: read)
        assert server.taken is read
        assert logging.getLogger("stormd").level == logging.ERROR
    finally:
        logging.getLogger("stormd").setLevel(level)
    assert said(manager) == ["RELOADING=1", "READY=1"]


def test_the_start_is_reported_once_a_second(manager: socket.socket, notifier: Notifier) -> None:
    now = [100.0]
    report = StartReport(notifier, clock=lambda: now[0])
    report(0, 4 << 30)
    report(1 << 30, 4 << 30)
    now[0] += 1.5
    report(2 << 30, 4 << 30)
    assert said(manager) == [
        "STATUS=pinning the pool, 0 B of 4.0 GiB",
        "STATUS=pinning the pool, 2.0 GiB of 4.0 GiB",
    ]
