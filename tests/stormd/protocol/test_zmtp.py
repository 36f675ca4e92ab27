"""ZMTP as bytes: what real sockets say, in pieces of every size, and what nobody may say."""

from __future__ import annotations

import random
import socket
import struct
import sys
from pathlib import Path

import pytest
import zmq

from stormd.protocol.zmtp import (
    COMMAND,
    GREETING_BYTES,
    OPENING,
    OTHER,
    Reader,
    Token,
    ZmtpError,
    framed,
)

LIMIT = 1 << 20
GREETING = OPENING[:GREETING_BYTES]


def ready(kind: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    properties = b"".join(
        bytes((len(name),)) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", kind), (b"Identity", identity))
    )
    return framed(b"\5READY" + properties, COMMAND)


def read_all(reader: Reader) -> list[bytes | Token]:
    found = []
    while (one := reader.read()) is not None:
        found.append(one)
    return found


def messages(reader: Reader, data: bytes) -> list[bytes | Token]:
    reader.data += data
    return [one for one in read_all(reader) if one is not OTHER]


def opened(limit: int = LIMIT) -> Reader:
    reader = Reader(limit)
    assert messages(reader, GREETING + ready()) == []
    return reader


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.ROUTER])
def test_what_libzmq_says_is_understood(tmp_path: Path, kind: int) -> None:
    bodies = [b"", b"x", bytes(255), bytes(256), random.Random(1).randbytes(300_000)]
    context = zmq.Context()
    with socket.socket(socket.AF_UNIX) as listener, context.socket(kind) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.IDENTITY, b"chosen")
        client.connect(f"ipc://{tmp_path}/s")
        line, _ = listener.accept()
        with line:
            line.settimeout(60)
            line.sendall(OPENING)
            reader, found = Reader(LIMIT), []
            if kind == zmq.DEALER:
                for body in bodies:
                    client.send(body)
                while len(found) < len(bodies):
                    found += messages(reader, line.recv(1000))
                assert found == bodies
                line.sendall(b"".join(map(framed, bodies)))
                assert [client.recv() for _ in bodies] == bodies
            while reader.identity != b"chosen":
                messages(reader, line.recv(1000))
    context.destroy(linger=0)


def test_pieces_of_any_size_come_to_the_same() -> None:
    chance = random.Random(0)
    for _ in range(20):
        bodies = [chance.randbytes(chance.choice((0, 1, 255, 256, 3000))) for _ in range(20)]
        data = GREETING + ready() + b"".join(map(framed, bodies))
        reader, found = Reader(LIMIT), []
        while data:
            size = chance.choice((1, 7, 64, 5000))
            found += messages(reader, data[:size])
            data = data[size:]
        assert found == bodies
        assert not reader.data


def test_a_heartbeat_is_answered() -> None:
    reader = opened()
    reader.data += framed(b"\4PING\0\1context", COMMAND) + framed(b"\4PONG", COMMAND)
    assert read_all(reader) == [OTHER, OTHER]
    assert reader.replies == [framed(b"\4PONGcontext", COMMAND)]


@pytest.mark.parametrize(
    "data",
    [
        b"G",
        b"\xff" + bytes(8) + b"\0",
        GREETING[:10] + b"\1",
        GREETING[:12] + b"PLAIN".ljust(52, b"\0"),
        GREETING + framed(b"a message"),
        GREETING + framed(b"\4PING", COMMAND),
        GREETING + framed(b"", COMMAND),
        GREETING + framed(b"\5READY\xff", COMMAND),
        GREETING + framed(b"\5READY\1x\xff\xff\xff\xff", COMMAND),
        GREETING + ready(b"SUB"),
        GREETING + b"\x08\0",
        GREETING + b"\5\0",
        GREETING + b"\6" + struct.pack(">Q", 5000),
        GREETING + ready() + b"\2" + struct.pack(">Q", LIMIT + 1),
        GREETING + ready() + b"\3" + b"\xff" * 8,
    ],
)
def test_what_is_none_of_zmtp_is_told_before_more_of_it_comes(data: bytes) -> None:
    reader = Reader(LIMIT)
    reader.data += data
    with pytest.raises(ZmtpError):
        read_all(reader)


def test_no_more_is_kept_than_what_is_not_read() -> None:
    reader = opened()
    frame = framed(bytes(1000))
    for _ in range(1000):
        reader.data += frame + frame[:500]
        assert reader.read() == bytes(1000)
        reader.data += frame[500:]
        assert reader.read() == bytes(1000)
        assert sys.getsizeof(reader.data) < 10 * len(frame)
    assert not reader.data


def test_random_bytes_end_in_an_error_or_nothing() -> None:
    chance = random.Random(0)
    for number in range(1000):
        reader = Reader(1000)
        data = GREETING + (ready() if number % 2 else b"") + chance.randbytes(200)
        try:
            messages(reader, data)
        except ZmtpError:
            continue
        assert len(reader.data) <= 1000 + 9
