"""ZMTP 3, as much of it as a ROUTER or a DEALER needs: turns a connection's bytes into messages.

libzmq bounds its queues in messages, keeps all parts of a message until the last has come, however
many there are, and accepts every connection. So the daemon itself speaks ZeroMQ's protocol
(https://rfc.zeromq.org/spec/23/, with the heartbeats of 37/ZMTP) to any DEALER, and so do our
clients (dealer.py). Pure: bytes go in, messages come out, and only unread bytes are kept.
"""

from __future__ import annotations

import struct
from enum import Enum, auto
from typing import Final, Literal

from stormd.protocol.errors import ProtocolError

__all__ = [
    "DEALER_OPENING",
    "GREETING_BYTE",
    "OPENING",
    "OTHER",
    "SEVERAL",
    "Reader",
    "Token",
    "ZmtpError",
    "framed",
]

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
GREETING_BYTE: Final = SIGNATURE[:1]
MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING_BYTES: Final = 64
MIN_VERSION: Final = 3

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

MAX_SHORT: Final = 255
COMMAND_BYTES: Final = 4096
"""Maximum bytes of a command: READY has a few properties, PING a context of 16 bytes."""

SOCKET_TYPES: Final = (b"DEALER", b"REQ", b"ROUTER")
"""The socket types that may connect to a ROUTER, or to a DEALER."""


class ZmtpError(ProtocolError):
    """The peer breaks the protocol: the rest of its bytes cannot be interpreted."""


class Token(Enum):
    """What `read` returns in place of a message of one part."""

    OTHER = auto()
    SEVERAL = auto()


OTHER: Final = Token.OTHER
"""A command, or one part of several: nothing to handle, but the caller should check the time."""

SEVERAL: Final = Token.SEVERAL
"""The end of a message of several parts, which were dropped."""


class Phase(Enum):
    """The state of the peer's handshake."""

    GREETING = auto()
    HANDSHAKE = auto()
    OPEN = auto()


class Reader:
    """Cuts the bytes that one peer sends into messages. `limit` is the maximum bytes of a part.

    `data` has the bytes that arrived and were not read; the caller who reads the socket appends to
    it. With `is_greeted`, the peer has done its handshake with another process.
    """

    __slots__ = ("_has_parts", "_phase", "data", "identity", "limit", "replies")

    def __init__(self, limit: int, *, is_greeted: bool = False) -> None:
        self.limit = limit
        self.identity = b""
        """The routing id that the peer chose, empty if it chose none."""
        self.replies: list[bytes] = []
        """Frames that answer heartbeats; the caller sends and clears them."""
        self._phase = Phase.OPEN if is_greeted else Phase.GREETING
        self._has_parts = False
        self.data = bytearray()

    @property
    def is_open(self) -> bool:
        """Whether the peer has done its handshake: only messages and commands follow."""
        return self._phase is Phase.OPEN

    def read(self) -> bytes | Token | None:
        """Return the next message or a Token in its place; None if more bytes must arrive.

        Raises:
            ZmtpError: the bytes are not ZMTP 3, or a part is larger than the limit.
        """
        if self._phase is Phase.GREETING:
            return OTHER if self._read_greeting() else None
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
        """Return the Token for a command or a part of several, or the body of a message."""
        if flags & COMMAND:
            self._handle_command(body)
            return OTHER
        if flags & MORE:
            self._has_parts = True
            return OTHER
        if self._has_parts:
            self._has_parts = False
            return SEVERAL
        return body

    def _read_greeting(self) -> bool:
        """Read the greeting; False if it is incomplete. An invalid one raises ZmtpError early."""
        data = bytes(self.data[:GREETING_BYTES])
        if data[:1] != GREETING_BYTE[: len(data)] or data[9:10] != SIGNATURE[9:][: len(data[9:10])]:
            raise ZmtpError("not ZMTP")
        if data[10:11] and data[10] < MIN_VERSION:
            raise ZmtpError(f"version {data[10]} of ZMTP, older than {MIN_VERSION}")
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

    def _handle_command(self, body: bytes) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if self._phase is Phase.HANDSHAKE:
            if name != b"READY":
                raise ZmtpError(f"the command {name!r:.40} in the place of READY")
            self._handle_ready(_properties(rest))
        elif name == b"PING":  # a time to live, two bytes, then a context to be echoed
            self.replies.append(framed(b"\4PONG" + rest[2:18], COMMAND))

    def _handle_ready(self, properties: dict[bytes, bytes]) -> None:
        kind = properties.get(b"socket-type", b"")
        if kind not in SOCKET_TYPES:
            raise ZmtpError(f"a socket of type {kind!r:.40}")
        self.identity = properties.get(b"identity", b"")
        self._phase = Phase.OPEN


def framed(body: bytes, flags: Literal[0, 4] = 0) -> bytes:
    """Return a message's only part in wire format, or a command if `flags` is COMMAND."""
    if len(body) <= MAX_SHORT:
        return bytes((flags, len(body))) + body
    return struct.pack(">BQ", flags | LONG, len(body)) + body


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return a READY's properties by their lower-case names.

    Raises:
        ZmtpError: the properties are cut short.
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


def _opening(kind: bytes) -> bytes:
    ready = b"\5READY\x0bSocket-Type\0\0\0\6" + kind + b"\x08Identity\0\0\0\0"
    greeting = SIGNATURE + bytes((MIN_VERSION, 1)) + MECHANISM + bytes(32)
    return greeting + framed(ready, COMMAND)


OPENING: Final = _opening(b"ROUTER")
"""The first bytes that the daemon sends on every connection: its greeting and READY."""

DEALER_OPENING: Final = _opening(b"DEALER")
"""The same of a client; both types of socket have names of six letters."""
