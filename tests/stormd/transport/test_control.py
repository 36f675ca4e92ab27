"""The control socket: no frame is left lying, nobody makes it wait, nobody fills it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest_asyncio
import zmq

from stormd.protocol.limits import MAX_FRAME_BYTES
from stormd.protocol.zmtp import OPENING, framed
from stormd.transport import control
from stormd.transport.control import SESSIONLESS_FRAME_BYTES, Connection, ControlSocket

SECONDS = 60.0
MAX_HELD = 4 << 20
ENDLESS = 50_000
"""Pieces of work that take 10 s and more: by then, whatever was to come between has not come."""


class Bench:
    """A bound socket that echoes, and keeps what it has seen; everybody who speaks is adopted."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.control = ControlSocket(asyncio.get_running_loop(), address, max_held_bytes=MAX_HELD)
        self.context = zmq.Context()
        self.seen: asyncio.Queue[tuple[Connection, bytes | None]] = asyncio.Queue()
        self.given_up: list[Connection] = []
        self.batches = 0
        self.adopts = True
        self.work: Callable[[bytes], Iterator[None]] | None = None
        self.control.allow(frozenset({os.getuid()}))
        self.control.start(self.take, self.end_batch, self.given_up.append)

    def take(self, connection: Connection, frame: bytes | None) -> Iterator[None]:
        if self.adopts and not connection.has_session:
            self.control.session_opened(connection)
        if frame is not None and self.work is not None:
            yield from self.work(frame)
        self.seen.put_nowait((connection, frame))
        if frame is not None:
            self.control.send(connection, frame)

    def end_batch(self) -> None:
        self.batches += 1

    async def next(self) -> tuple[Connection, bytes | None]:
        async with asyncio.timeout(SECONDS):
            return await self.seen.get()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():  # noqa: ASYNC110 - nothing else tells of it
                await asyncio.sleep(0.001)

    def connect(self) -> zmq.Socket[bytes]:
        client = self.context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        client.connect(self.address)
        return client

    async def raw(self, data: bytes = b"") -> socket.socket:
        """Return a connection that has sent these bytes, which reads nothing by itself."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(SECONDS)
        await asyncio.to_thread(line.connect, self.address.removeprefix("ipc://"))
        await asyncio.to_thread(line.sendall, data)
        return line


CLIENT_OPENING = OPENING.replace(b"\6ROUTER", b"\6DEALER")


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(f"ipc://{tmp_path}/s")
    yield bench
    bench.control.close()
    bench.control.close()
    bench.context.destroy(linger=0)
    assert not (tmp_path / "s").exists()
    assert bench.control._held_bytes == 0


async def test_the_work_of_a_frame_is_shared_out_between_connections(bench: Bench) -> None:
    """While one asks for much, others are served in each turn, and its own come in their order."""
    steps, served = 0, False

    def slow(frame: bytes) -> Iterator[None]:
        nonlocal steps, served
        served = served or frame == b"quick"
        if frame == b"slow":
            while steps < 300 or (not served and steps < ENDLESS):
                steps += 1
                bench.control.has_unsent_answers = True
                end = asyncio.get_running_loop().time() + 0.0002
                while asyncio.get_running_loop().time() < end:
                    pass
                yield

    busy, other = bench.connect(), bench.connect()
    for client in (busy, other):
        client.send(b"before")
        await bench.next()
    bench.work = slow
    busy.send(b"slow")
    busy.send(b"next")
    await bench.until(lambda: steps > 10)
    other.send(b"quick")
    assert (await bench.next())[1] == b"quick"
    assert (await bench.next())[1] == b"slow"
    assert (await bench.next())[1] == b"next"
    assert bench.batches > steps * 0.0002 / control.TURN_SECONDS / 2


async def test_the_parts_of_a_message_are_not_kept(bench: Bench) -> None:
    """However many, and however large they are in all."""
    line = await bench.raw(CLIENT_OPENING)
    part = b"\3" + (60_000).to_bytes(8) + bytes(60_000)
    for _ in range(3 * MAX_HELD // len(part)):
        await asyncio.to_thread(line.sendall, part)
    await asyncio.to_thread(line.sendall, b"\1\0" * 100_000 + framed(b"") + framed(b"after"))
    assert (await bench.next())[1] is None
    assert (await bench.next())[1] == b"after"
    assert not bench.given_up
    line.close()


async def test_a_connection_without_a_session_sends_small_frames_alone(bench: Bench) -> None:
    bench.adopts = False
    line = await bench.raw(CLIENT_OPENING + b"\2" + (SESSIONLESS_FRAME_BYTES + 1).to_bytes(8))
    assert await asyncio.to_thread(_is_ended, line)
    assert bench.seen.empty()


async def test_of_halves_of_frames_no_more_is_kept_than_may_be(bench: Bench) -> None:
    """Each may hold one that is not complete, all together no more than the sum."""
    lines, connections = [], []
    for _ in range(2 * MAX_HELD // MAX_FRAME_BYTES):
        lines.append(await bench.raw(CLIENT_OPENING + framed(b"hello")))
        connections.append((await bench.next())[0])
        half = b"\2" + MAX_FRAME_BYTES.to_bytes(8) + bytes(MAX_FRAME_BYTES - 1000)
        await asyncio.to_thread(lines[-1].sendall, half)
        await bench.until(
            lambda one=connections[-1]: (
                len(one.reader.data) >= MAX_FRAME_BYTES - 1000 or not one.is_open
            )
        )
        assert bench.control._held_bytes <= MAX_HELD + control.READ_BYTES
    assert len(bench.given_up) >= 4
    for line in lines:
        line.close()


async def test_who_says_nothing_is_ended_unless_it_has_a_session(bench: Bench) -> None:
    client = bench.connect()
    client.send(b"adopted")
    served, _ = await bench.next()
    silent, greeted = await bench.raw(), await bench.raw(CLIENT_OPENING)
    await bench.until(lambda: len(bench.control._connections) == 3)
    for _ in range(control.SILENT_TICKS + 1):
        bench.control.tick()
    for line in (silent, greeted):
        assert await asyncio.to_thread(_is_ended, line)
    assert served.is_open
    bench.control.session_ended(served)
    for _ in range(control.SILENT_TICKS + 1):
        bench.control.tick()
    assert not served.is_open


async def test_users_are_heard_from_when_they_are_allowed(bench: Bench) -> None:
    """And not from when they are not; who has a session keeps it."""
    bench.adopts = False
    client = bench.connect()
    client.send(b"one")
    connection, _ = await bench.next()
    bench.control.session_opened(connection)
    idle = await bench.raw()
    await bench.until(lambda: len(bench.control._connections) == 2)
    bench.control.allow(frozenset())
    assert await asyncio.to_thread(_is_ended, idle)
    assert connection.is_open


def _is_ended(line: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it has said before."""
    with line:
        try:
            while line.recv(65536):
                pass
        except ConnectionResetError:
            pass
    return True
