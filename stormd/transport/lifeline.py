"""The lifelines: one stream connection for each session; when it ends, the session ends.

A connection belongs to a session once it has sent that session's token, as that session's user. The
daemon then sends the session's descriptors once; afterwards the client may send others, each with a
number. However the client's process ends, the kernel closes its end of the connection and `on_lost`
is called.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stormd.protocol.limits import PIECE_NUMBER_BYTES, TOKEN_BYTES
from stormd.transport.listener import Credentials, Listener, peer_credentials
from stormd.transport.strangers import Strangers

__all__ = ["GREETING_SECONDS", "LifelineListener", "OnPiece", "OnToken"]

log = logging.getLogger(__name__)

GREETING_SECONDS: Final = 5.0
"""Time in which a connection must send its token."""

MAX_STRANGERS: Final = 256
MAX_STRANGERS_OF_ONE: Final = 128
"""Maximum connections without a session at a time, of all users and of each. One more closes the
oldest: a client with a token sends it at once, and connections that send none must not keep it out.
"""

MAX_SENT: Final = 8
"""Maximum descriptors that a client may send: those that an earlier daemon has shared with it."""

OnToken = Callable[[bytes, int, list[int]], tuple[int, tuple[int, ...]] | None]


OnPiece = Callable[[int, int, int], None]
"""Takes a session, a piece's number, and the piece's descriptor, which the callee owns."""


class LifelineListener:
    """Listens at `path` from construction on.

    `on_token(token, uid, descriptors)` returns None, or the session that the token opens and the
    descriptors to send, which are closed here. It owns those that came with the token.
    `on_piece(session, number, descriptor)` takes each descriptor that a client sends afterwards.
    `on_lost(session)` is called when an accepted connection ends, unless `end` ended it.
    Connections of users not in `allow` are closed at once. `listening` is a socket that is already
    bound there.

    Raises:
        OSError: the path cannot be bound.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        *,
        listening: socket.socket | None = None,
        on_token: OnToken,
        on_piece: OnPiece,
        on_lost: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._on_token = on_token
        self._on_piece = on_piece
        self._on_lost = on_lost
        self._allowed: frozenset[int] = frozenset()
        self._strangers: Strangers[socket.socket] = Strangers(MAX_STRANGERS, MAX_STRANGERS_OF_ONE)
        self._timers: dict[socket.socket, asyncio.TimerHandle] = {}  # of connections in _strangers
        self._lines: dict[int, socket.socket] = {}
        self.listener = Listener(
            loop, path, listening=listening, on_line=self._admit, on_lack=self._make_room
        )
        self.listener.start()

    def allow(self, uids: frozenset[int]) -> None:
        """Accept these users from now on; lifelines that have a session are not affected."""
        self._allowed = uids

    def end(self, session: int) -> None:
        """Close the session's connection, if it has one."""
        line = self._lines.pop(session, None)
        if line is not None:
            self._close(line)

    def close(self, *, keeps_file: bool = False) -> None:
        """Close everything without calling `on_lost`. May be called twice."""
        self.listener.close(keeps_file=keeps_file)
        for line in self._strangers.all:
            self._dismiss(line)
        for session in list(self._lines):
            self.end(session)

    # --- connections without a session ------------------------------------------------------

    def _admit(self, line: socket.socket, credentials: Credentials) -> None:
        uid = credentials.uid
        if uid not in self._allowed:
            line.close()
            return
        self._timers[line] = self._loop.call_later(GREETING_SECONDS, self._dismiss, line)
        self._loop.add_reader(line.fileno(), self._greet, line)
        leaving = self._strangers.add(line, uid)
        if leaving is not None:
            self._dismiss(leaving)

    def _make_room(self) -> None:
        """Close the oldest connection without a session, of the user who has most of them."""
        leaving = self._strangers.oldest()
        if leaving is not None:
            self._dismiss(leaving)

    def _greet(self, line: socket.socket) -> None:
        """Read the token with one call: 16 bytes of a local stream are never split."""
        descriptors: list[int] = []
        try:
            token, descriptors, _, _ = socket.recv_fds(
                line, TOKEN_BYTES + 1, MAX_SENT, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            token = b""
        granted = None
        if len(token) == TOKEN_BYTES:
            granted = self._on_token(token, peer_credentials(line).uid, descriptors)
        else:
            for descriptor in descriptors:
                os.close(descriptor)
        if granted is None:
            self._dismiss(line)
            return
        self._adopt(line, *granted)

    def _adopt(self, line: socket.socket, session: int, descriptors: tuple[int, ...]) -> None:
        self._settle(line)
        self._lines[session] = line
        self._loop.remove_reader(line.fileno())
        self._loop.add_reader(line.fileno(), self._hear, session)
        try:
            socket.send_fds(line, [bytes([len(descriptors)])], descriptors)
        except OSError:
            self.end(session)
            self._on_lost(session)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _dismiss(self, line: socket.socket) -> None:
        self._settle(line)
        self._close(line)

    def _settle(self, line: socket.socket) -> None:
        """Stop counting a connection as one without a session."""
        self._strangers.remove(line)
        self._timers.pop(line).cancel()

    # --- sessions ---------------------------------------------------------------------------

    def _hear(self, session: int) -> None:
        """Take a piece, or end the lifeline: its peer is gone or breaks the protocol."""
        descriptors: list[int] = []
        try:  # never split, like the token
            number, descriptors, _, _ = socket.recv_fds(
                self._lines[session], PIECE_NUMBER_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return  # a spurious wake-up
        except OSError:
            number = b""
        if len(number) == PIECE_NUMBER_BYTES and descriptors:
            self._on_piece(session, int.from_bytes(number, "little"), descriptors[0])
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self.end(session)
        self._on_lost(session)

    def _close(self, line: socket.socket) -> None:
        self._loop.remove_reader(line.fileno())
        line.close()
