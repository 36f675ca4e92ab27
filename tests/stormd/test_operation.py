"""The order of what an operator's tools are told, and that nothing outlives the daemon."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormd.config import Config
from stormd.errors import AddressInUse, ConfigError
from stormd.monitoring.counters import Counters
from stormd.notify import Notifier
from stormd.running import StartReport, operated, reload_settings

SECONDS = 60.0

EMPTY: dict[str, Any] = {
    "cache": None,
    "spill": None,
    "sessions": [],
    "entries": 0,
    "raw_bytes": 0,
    "gpus": [],
}


class FakeServer:
    """A daemon whose workers can be made to hang."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.hanging: list[str] = []
        self.taken: Config | None = None

    def status(self) -> dict[str, Any]:
        names = ("capacity", "committed", "used", "promised", "peak_used", "largest_free")
        pool = {f"{name}_bytes": 0 for name in names}
        return {"version": "1", "pool": pool, "log": {"dropped_lines": 0}, "workers": [], **EMPTY}

    def stuck(self) -> list[str]:
        return self.hanging

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


async def get(port: int, path: str) -> tuple[int, str]:
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    return int(answer.split(" ")[1]), answer.partition("\r\n\r\n")[2]


async def test_ready_then_stopping(manager: socket.socket, notifier: Notifier) -> None:
    async with operated(FakeServer(), notifier, metrics_address="", watchdog_seconds=0.0) as none:
        assert none is None
        assert said(manager) == ["READY=1"]
    assert said(manager) == ["STOPPING=1"]


async def test_serves_metrics_and_health(notifier: Notifier) -> None:
    server = FakeServer()
    async with operated(
        server, notifier, metrics_address="127.0.0.1:0", watchdog_seconds=0.0
    ) as endpoint:
        assert endpoint is not None
        status, body = await get(endpoint.port, "/metrics")
        assert status == 200
        assert "stormd_pool_bytes 0.0" in body
        assert await get(endpoint.port, "/healthz") == (200, "ok\n")
        server.hanging = ["cpu-0 has ended: MemoryError()"]
        assert await get(endpoint.port, "/healthz") == (503, "cpu-0 has ended: MemoryError()\n")
    assert endpoint.port == 0


async def test_the_watchdog_is_fed_and_ends(manager: socket.socket, notifier: Notifier) -> None:
    async with operated(FakeServer(), notifier, metrics_address="", watchdog_seconds=60.0):
        await asyncio.sleep(0)  # lets the task begin
        assert said(manager) == ["READY=1", "WATCHDOG=1"]
    assert [task for task in asyncio.all_tasks() if task.get_name() == "watchdog"] == []


async def test_not_ready_where_the_endpoint_cannot_listen(
    manager: socket.socket, notifier: Notifier
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUse):
            async with operated(
                FakeServer(), notifier, metrics_address=address, watchdog_seconds=60.0
            ):
                pytest.fail("served without its endpoint")
    assert said(manager) == []


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


def test_a_bad_file_changes_nothing(manager: socket.socket, notifier: Notifier) -> None:
    def read() -> Config:
        raise ConfigError("config file x is not TOML")

    server = FakeServer()
    reload_settings(server, notifier, read)
    assert server.taken is None
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
