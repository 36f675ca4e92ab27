"""A socket that listens: whose a connection is, and what happens to its file and descriptors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stormd.transport import listener as module
from stormd.transport.listener import Credentials, Listener

SECONDS = 60.0


class Bench:
    """A listener, and what it has accepted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: asyncio.Queue[tuple[socket.socket, Credentials]] = asyncio.Queue()
        self.lacks = 0
        self.listener = Listener(
            asyncio.get_running_loop(),
            path,
            on_accepted=self.take,
            on_out_of_descriptors=self.count,
        )
        self.listener.start()

    def take(self, line: socket.socket, credentials: Credentials) -> None:
        self.lines.put_nowait((line, credentials))

    def count(self) -> None:
        self.lacks += 1

    async def connected(self) -> Credentials:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            await asyncio.to_thread(caller.connect, str(self.path))
            async with asyncio.timeout(SECONDS):
                line, credentials = await self.lines.get()
            assert not line.getblocking()
            line.close()
            return credentials


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "s")
    yield bench
    bench.listener.close()
    bench.listener.close()
    assert not bench.path.exists()


async def test_a_lack_of_descriptors_is_waited_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = bench.listener._socket
    failures = [OSError(24, "Too many open files")]

    class Scarce:
        def accept(self) -> object:
            if failures:
                raise failures.pop()
            return listening.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(listening, name)

    monkeypatch.setattr(bench.listener, "_socket", Scarce())
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    await bench.connected()
    assert not failures
    assert bench.lacks == 1
