"""The log's queue: in order, bounded in bytes, and never waited for."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest
from support.waiting import wait_until

from stormd.monitoring.logs import LogQueue

SECONDS = 60.0
PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reading, writing
    for end in (reading, writing):
        os.close(end)


def read(reading: int, nbytes: int) -> bytes:
    """Return so many bytes; the test's own deadline bounds the wait."""
    found = b""
    while len(found) < nbytes:
        found += os.read(reading, nbytes - len(found))
    return found


def test_lines_arrive_in_order_however_long_nobody_reads(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    lines = [f"line {number}\n" for number in range(5000)]
    with LogQueue(writing) as queue:
        for line in lines:
            queue.write(line)
        expected = "".join(lines).encode()
        assert read(reading, len(expected)) == expected
        assert queue.dropped == 0


def test_its_end_does_not_wait_for_a_reader(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    queue = LogQueue(writing)
    queue.write("x" * 10 * PIPE_BYTES)
    queue.close(0.01)
    queue.close(0.01)
    queue.write("too late")
    assert queue.dropped == 1
    assert read(reading, 10 * PIPE_BYTES) == b"x" * 10 * PIPE_BYTES
    queue.close(SECONDS)


def test_without_a_reader_all_is_dropped_and_nothing_raised() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with LogQueue(writing) as queue:
        for _ in range(5):
            queue.write("unread\n")
        wait_until(lambda: queue.dropped == 5, SECONDS, lambda: queue.dropped)
    assert queue.dropped == 5
    os.close(writing)


def test_a_descriptor_that_was_made_not_to_block_is_waited_for(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    with LogQueue(writing) as queue:
        queue.write("x" * 10 * PIPE_BYTES)
        assert read(reading, 10 * PIPE_BYTES) == b"x" * 10 * PIPE_BYTES
        assert queue.dropped == 0
