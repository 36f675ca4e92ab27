"""The control socket: no frame is left lying, nobody makes it wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import zmq

from stormd import open_files
from stormd.control import FRAMES_A_TURN, PARTS_AT_ONCE, ControlSocket, Delivery

SECONDS = 10.0


class Bench:
    """A bound socket that echoes, and keeps what it has seen."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.control = ControlSocket(asyncio.get_running_loop(), address)
        self.context = zmq.Context()
        self.seen: asyncio.Queue[tuple[bytes, bytes | None]] = asyncio.Queue()
        self.batches = 0
        self.control.start(self.take, self.end_batch)

    def take(self, route: bytes, frame: zmq.Frame | None) -> None:
        data = None if frame is None else frame.bytes
        self.seen.put_nowait((route, data))
        if data is not None:
            assert self.control.send(route, data) is not Delivery.GONE

    def end_batch(self) -> None:
        self.batches += 1

    def connect(self) -> zmq.Socket[bytes]:
        client = self.context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        client.connect(self.address)
        return client


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(f"ipc://{tmp_path}/s")
    yield bench
    bench.control.close()
    bench.control.close()
    bench.context.destroy(linger=0)
    assert not (tmp_path / "s").exists()


async def test_a_burst_is_handed_on_whole(bench: Bench) -> None:
    client = bench.connect()
    for number in range(3 * FRAMES_A_TURN):
        client.send(b"%d" % number)
    for number in range(3 * FRAMES_A_TURN):
        async with asyncio.timeout(SECONDS):
            assert (await bench.seen.get())[1] == b"%d" % number
    assert bench.batches >= 3


async def test_frames_that_arrive_while_we_send_are_not_left_lying(bench: Bench) -> None:
    """Each echo may swallow the edge of the next frame; all must come back all the same."""
    clients = [bench.connect() for _ in range(4)]

    def talk(client: zmq.Socket[bytes]) -> None:
        for number in range(200):
            client.send(b"%d" % number)
            assert client.recv() == b"%d" % number

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(asyncio.to_thread(talk, client))


async def test_a_message_of_several_parts_is_told_apart(bench: Bench) -> None:
    client = bench.connect()
    client.send_multipart([b"one", b"two", b"three"])
    client.send(b"after")
    async with asyncio.timeout(SECONDS):
        assert (await bench.seen.get())[1] is None
        assert (await bench.seen.get())[1] == b"after"


async def test_a_message_of_very_many_parts_does_not_hold_the_loop(bench: Bench) -> None:
    client = bench.connect()
    client.send_multipart([b""] * 30_000)
    async with asyncio.timeout(SECONDS):
        assert (await bench.seen.get())[1] is None
    assert bench.batches >= 30_000 // (FRAMES_A_TURN * PARTS_AT_ONCE)
    client.send(b"after")
    async with asyncio.timeout(SECONDS):
        assert (await bench.seen.get())[1] == b"after"


async def test_nobody_there_and_nobody_reading_are_told_apart(bench: Bench) -> None:
    assert bench.control.send(b"nobody", b"x") is Delivery.GONE
    client = bench.context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.setsockopt(zmq.RCVHWM, 1)
    client.connect(bench.address)
    client.send(b"hello")
    async with asyncio.timeout(SECONDS):
        route, _ = await bench.seen.get()
    outcomes = {bench.control.send(route, bytes(100_000)) for _ in range(1000)}
    assert outcomes == {Delivery.SENT, Delivery.FULL}


async def test_connections_that_come_while_descriptors_are_scarce_are_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = bench.connect()
    served.send(b"before")
    async with asyncio.timeout(SECONDS):
        assert (await bench.seen.get())[1] == b"before"
    bench.control._watch()  # so that the one served is not taken for one that comes
    monkeypatch.setattr(open_files, "are_scarce", lambda: True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
        late.settimeout(SECONDS)
        late.connect(bench.address.removeprefix("ipc://"))
        assert await asyncio.to_thread(_is_ended, late)
    served.send(b"after")
    async with asyncio.timeout(SECONDS):
        assert (await bench.seen.get())[1] == b"after"
    monkeypatch.undo()
    another = bench.connect()
    another.send(b"another")
    async with asyncio.timeout(SECONDS):
        assert (await bench.seen.get())[1] == b"another"


def _is_ended(line: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it has said before."""
    while line.recv(256):
        pass
    return True


async def test_an_address_that_cannot_be_bound_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(zmq.ZMQError):
        ControlSocket(asyncio.get_running_loop(), f"ipc://{tmp_path}/no/such/directory")
