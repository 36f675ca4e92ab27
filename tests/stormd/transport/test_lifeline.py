"""The lifelines: who may have one, what travels on it, and what its end means."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stormd.transport import lifeline
from stormd.transport.lifeline import LifelineListener
from stormd.transport.sessionless import Sessionless

TOKEN = b"0123456789abcdef"
SECONDS = 60.0


class Bench:
    """A listener with one session, 7, whose token is TOKEN."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: asyncio.Queue[int] = asyncio.Queue()
        self.uids: list[int] = []
        self.given: list[str] = []
        self.granted = False
        self.pieces: asyncio.Queue[tuple[int, int, str]] = asyncio.Queue()
        self.listener = LifelineListener(
            asyncio.get_running_loop(),
            path,
            on_token=self.grant,
            on_piece=self.take_piece,
            on_lost=self.lost.put_nowait,
        )
        self.listener.allow(frozenset({os.getuid()}))

    def grant(
        self, token: bytes, uid: int, descriptors: list[int]
    ) -> tuple[int, tuple[int, ...]] | None:
        self.uids.append(uid)
        self.given += [str(Path(f"/proc/self/fd/{one}").readlink()) for one in descriptors]
        for one in descriptors:
            os.close(one)
        if token != TOKEN or self.granted:
            return None
        self.granted = True
        reading, writing = os.pipe()
        os.close(writing)
        return 7, (reading,)

    def take_piece(self, session: int, number: int, descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        self.pieces.put_nowait((session, number, name))
        os.close(descriptor)

    async def connect(self, token: bytes) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(SECONDS)
        await asyncio.to_thread(line.connect, str(self.path))
        if token:
            line.sendall(token)
        return line


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "s.lifeline")
    yield bench
    bench.listener.close()
    bench.listener.close()
    assert not bench.path.exists()


async def ended(line: socket.socket) -> bool:
    """Whether the daemon has closed the connection."""
    try:
        return await asyncio.to_thread(line.recv, 1) == b""
    except ConnectionResetError:
        return True


async def adopted(bench: Bench) -> socket.socket:
    line = await bench.connect(TOKEN)
    data, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, line, 1, 4)
    assert (data, len(descriptors)) == (b"\x01", 1)
    os.close(descriptors[0])
    return line


async def test_a_token_opens_one_lifeline_whose_end_is_told(bench: Bench) -> None:
    line = await adopted(bench)
    assert bench.uids == [os.getuid()]
    again = await bench.connect(TOKEN)
    assert await ended(again)
    again.close()
    line.close()
    async with asyncio.timeout(SECONDS):
        assert await bench.lost.get() == 7


async def test_a_wrong_token_and_silence_are_shown_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in (bytes(16), b"short", TOKEN + b"more", b""):
        if not token:
            monkeypatch.setattr(lifeline, "GREETING_SECONDS", 0.01)
        line = await bench.connect(token)
        assert await ended(line)
        line.close()
    assert bench.lost.empty()


async def test_strangers_are_limited_and_keep_nobody_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.listener._sessionless = Sessionless(2, 2)
    monkeypatch.setattr(lifeline, "GREETING_SECONDS", 60.0)  # none of them goes for its silence
    silent = [await bench.connect(b"") for _ in range(5)]
    for line in silent[:3]:
        assert await ended(line)
    late = await adopted(bench)
    assert len(bench.listener._sessionless) == 1
    for line in (*silent, late):
        line.close()


async def test_who_is_not_allowed_is_shown_out_at_once(bench: Bench) -> None:
    bench.listener.allow(frozenset({os.getuid() + 1}))
    line = await bench.connect(b"")
    assert await ended(line)
    assert not bench.uids
    line.close()


@pytest.mark.parametrize(("said", "descriptors"), [(b"?", 0), (b"?", 1), (bytes(8), 0)])
async def test_other_speech_on_the_lifeline_is_its_end(
    bench: Bench, said: bytes, descriptors: int
) -> None:
    line = await adopted(bench)
    socket.send_fds(line, [said], [0] * descriptors)
    async with asyncio.timeout(SECONDS):
        assert await bench.lost.get() == 7
    assert await ended(line)
    line.close()


async def test_an_end_from_this_side_is_not_told_to_us(bench: Bench) -> None:
    line = await adopted(bench)
    bench.listener.end(7)
    bench.listener.end(7)
    assert await ended(line)
    line.close()
    assert bench.lost.empty()
