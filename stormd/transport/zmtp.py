"""ZMTP 3, as much of it as a ROUTER needs: how the bytes of a connection become messages.

libzmq bounds its queues in messages, keeps the parts of a message until the last has come, however
many they are, and lets in whoever connects. So the daemon speaks its protocol
(https://rfc.zeromq.org/spec/23/, with the heartbeats of 37/ZMTP) itself, to any DEALER. Pure: bytes
go in, messages come out, and what is kept is what was added and not read.
"""

from __future__ import annotations

import struct
from enum import Enum, auto
from typing import Final, Literal

__all__ = ["OPENING", "OTHER", "SEVERAL", "Reader", "Token", "ZmtpError", "framed"]

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING_BYTES: Final = 64
LEAST_VERSION: Final = 3

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

MAX_SHORT: Final = 255
COMMAND_BYTES: Final = 4096
"""Of the largest command: READY holds a few properties, PING a context of 16 bytes."""

SOCKET_TYPES: Final = (b"DEALER", b"REQ", b"ROUTER")
"""What may speak to a ROUTER."""


class ZmtpError(Exception):
    """The peer breaks the protocol: nothing more of the connection can be understood."""


class Token(Enum):
    """What was read in the place of a message that has one part."""

    OTHER = auto()
    SEVERAL = auto()


OTHER: Final = Token.OTHER
"""A command, or one part of several: nothing for anybody, and time to look at the clock."""

SEVERAL: Final = Token.SEVERAL
"""The end of a message of several parts, which were dropped."""


class Phase(Enum):
    """How far the peer has come."""

    GREETING = auto()
    HANDSHAKE = auto()
    OPEN = auto()


class Reader:
    """What one peer sends, cut into messages. `limit` is the bytes of the largest part.

    `data` is what has arrived and was not read; whoever reads of the socket adds to it. The peer
    of a connection that `is_greeted` has said who it is to somebody else.
    """

    __slots__ = ("_has_parts", "_phase", "data", "identity", "limit", "replies")

    def __init__(self, limit: int, *, is_greeted: bool = False) -> None:
        self.limit = limit
        self.identity = b""
        """The routing id that the peer chose, empty where it left that to us."""
        self.replies: list[bytes] = []
        """Frames that answer heartbeats, to be sent and cleared by the caller."""
        self._phase = Phase.OPEN if is_greeted else Phase.GREETING
        self._has_parts = False
        self.data = bytearray()

    def read(self) -> bytes | Token | None:
        """Return the next message, or what there is in its place; None where more must arrive.

        Raises:
            ZmtpError: it is none of ZMTP 3's, or its part is larger than the limit.
        """
        if self._phase is Phase.GREETING:
            return OTHER if self._greeted() else None
        data = self.data
        if len(data) < 2:
            return None
        flags = data[0]
        if flags & LONG:
            if len(data) < 9:
                return None
            size, begin = int.from_bytes(data[1:9]), 9
        else:
            size, begin = data[1], 2
        is_plain = not flags & ~LONG and self._phase is Phase.OPEN and not self._has_parts
        if not is_plain or size > self.limit:
            self._check(flags, size)
        end = begin + size
        if len(data) < end:
            return None
        body = bytes(data[begin:end])
        del data[:end]
        return body if is_plain else self._special(flags, body)

    def _special(self, flags: int, body: bytes) -> bytes | Token:
        """Return what stands for a command, or for a part of several."""
        if flags & COMMAND:
            self._obey(body)
            return OTHER
        if flags & MORE:
            self._has_parts = True
            return OTHER
        if self._has_parts:
            self._has_parts = False
            return SEVERAL
        return body

    def _greeted(self) -> bool:
        """Read the greeting; False where it is not complete. What cannot be one is told at once."""
        data = bytes(self.data[:GREETING_BYTES])
        if data[:1] != SIGNATURE[:1][: len(data)] or data[9:10] != SIGNATURE[9:][: len(data[9:10])]:
            raise ZmtpError("not ZMTP")
        if data[10:11] and data[10] < LEAST_VERSION:
            raise ZmtpError(f"version {data[10]} of ZMTP, older than {LEAST_VERSION}")
        if len(data) < GREETING_BYTES:
            return False
        if data[12:32] != MECHANISM:
            raise ZmtpError("another mechanism of ZMTP than NULL")
        del self.data[:GREETING_BYTES]
        self._phase = Phase.HANDSHAKE
        return True

    def _check(self, flags: int, size: int) -> None:
        if flags & ~(MORE | LONG | COMMAND) or (flags & MORE and flags & COMMAND):
            raise ZmtpError(f"a frame with flags {flags:#x}")
        limit = COMMAND_BYTES if flags & COMMAND else self.limit
        if size > limit:
            raise ZmtpError(f"a frame of {size} bytes; the limit is {limit}")
        if not flags & COMMAND and self._phase is not Phase.OPEN:
            raise ZmtpError("a message before READY")

    def _obey(self, body: bytes) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if self._phase is Phase.HANDSHAKE:
            if name != b"READY":
                raise ZmtpError(f"the command {name!r:.40} in the place of READY")
            self._be_ready(_properties(rest))
        elif name == b"PING":  # of a time to live, two bytes, and a context to be echoed
            self.replies.append(framed(b"\4PONG" + rest[2:18], COMMAND))

    def _be_ready(self, properties: dict[bytes, bytes]) -> None:
        kind = properties.get(b"socket-type", b"")
        if kind not in SOCKET_TYPES:
            raise ZmtpError(f"a socket of type {kind!r:.40}")
        self.identity = properties.get(b"identity", b"")
        self._phase = Phase.OPEN


def framed(body: bytes, flags: Literal[0, 4] = 0) -> bytes:
    """Return a part, the only one of its message, or with COMMAND a command, as it travels."""
    if len(body) <= MAX_SHORT:
        return bytes((flags, len(body))) + body
    return struct.pack(">BQ", flags | LONG, len(body)) + body


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return a READY's properties by their names in lower case.

    Raises:
        ZmtpError: they are cut short.
    """
    found: dict[bytes, bytes] = {}
    while data:
        begin = 1 + data[0]
        name, size = data[1:begin], int.from_bytes(data[begin : begin + 4])
        value, rest = data[begin + 4 : begin + 4 + size], data[begin + 4 + size :]
        if len(data) < begin + 4 + size:
            raise ZmtpError("a READY that is cut short")
        found[name.lower()], data = value, rest
    return found


OPENING: Final = (
    SIGNATURE
    + bytes((LEAST_VERSION, 1))
    + MECHANISM
    + bytes(32)
    + framed(b"\5READY\x0bSocket-Type\0\0\0\6ROUTER\x08Identity\0\0\0\0", COMMAND)
)  # fmt: skip
"""What the daemon says first on every connection: its greeting and READY."""
