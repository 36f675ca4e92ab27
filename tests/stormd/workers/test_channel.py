from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from stormd.workers.channel import WorkerChannel


class End:
    """One end, and what it has heard."""

    def __init__(self, end: socket.socket) -> None:
        self.heard: list[tuple[str, list[Any], int]] = []
        self.ended = asyncio.Event()
        self._hears = asyncio.Event()
        self.line = WorkerChannel(asyncio.get_running_loop(), end, self._hear, self.ended.set)

    def _hear(self, kind: str, values: list[Any], descriptor: int) -> None:
        self.heard.append((kind, values, descriptor))
        self._hears.set()

    async def hears(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.heard) < count:
                self._hears.clear()
                await self._hears.wait()


def pair() -> tuple[End, End]:
    one, other = socket.socketpair()
    return End(one), End(other)


async def test_messages_come_in_order_with_their_descriptors() -> None:
    here, there = pair()
    pipes = [os.pipe() for _ in range(40)]
    for number, (_, writing) in enumerate(pipes):
        here.line.send("plain", number)
        here.line.send("with", number, descriptor=writing)
    await there.hears(80)
    for number, (reading, _) in enumerate(pipes):
        assert there.heard[2 * number] == ("plain", [number], -1)
        kind, values, descriptor = there.heard[2 * number + 1]
        assert (kind, values) == ("with", [number])
        os.write(descriptor, b"%d" % number)
        os.close(descriptor)
        assert os.read(reading, 10) == b"%d" % number
        assert os.read(reading, 1) == b""  # ours was closed once it had left
        os.close(reading)
    here.line.close()
    async with asyncio.timeout(30):
        await there.ended.wait()


async def test_what_does_not_fit_waits_and_nobody_with_it() -> None:
    here, there = pair()
    large = {"sessions": ["x" * 100] * 20_000}
    for _ in range(3):
        here.line.send("report", large)
    await there.hears(3)
    assert there.heard == [("report", [large], -1)] * 3
    there.line.close()
    there.line.close()
    there.line.send("late")
    async with asyncio.timeout(30):
        await here.ended.wait()


async def test_an_end_closes_what_nobody_takes() -> None:
    here, there = pair()
    reading, writing = os.pipe()
    there.line.close()
    here.line.send("with", descriptor=writing)
    async with asyncio.timeout(30):
        await here.ended.wait()
    reading_again, writing_again = os.pipe()
    here.line.send("with", descriptor=writing_again)
    for one in (reading, reading_again):
        assert os.read(one, 1) == b""
        os.close(one)
