"""The lifelines: one stream connection for each session; when it ends, the session ends.

A connection belongs to a session once it has sent that session's token, as that session's user. The
daemon then sends the session's descriptors once; afterwards the client may send others, each with a
number. However the client's process ends, the kernel closes its end of the connection and `on_lost`
is called.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from stormd.open_files import close_all
from stormd.protocol import Credentials, peer_credentials
from stormd.protocol.limits import PIECE_NUMBER_BYTES, TOKEN_BYTES
from stormd.transport.listener import Listener, received
from stormd.transport.sessionless import Sessionless

__all__ = ["GREETING_SECONDS", "LifelineListener", "OnPiece", "OnToken"]

GREETING_SECONDS: Final = 5.0
"""Time in which a connection must send its token."""

MAX_SESSIONLESS: Final = 256
MAX_SESSIONLESS_OF_USER: Final = 128
"""Maximum connections without a session at a time, of all users and of each. One more closes the
oldest: a client with a token sends it at once, and connections that send none must not keep it out.
"""

MAX_DESCRIPTORS: Final = 8
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
        self._sessionless: Sessionless[socket.socket] = Sessionless(
            MAX_SESSIONLESS, MAX_SESSIONLESS_OF_USER
        )
        self._timers: dict[
            socket.socket, asyncio.TimerHandle
        ] = {}  # of connections in _sessionless
        self._lines: dict[int, socket.socket] = {}
        self.listener = Listener(
            loop,
            path,
            listening=listening,
            on_accepted=self._admit,
            on_out_of_descriptors=self._free_descriptor,
        )
        self.listener.start()

    def allow(self, uids: frozenset[int]) -> None:
        """Accept these users from now on; lifelines that have a session are not affected."""
        self._allowed = uids

    def end(self, session: int, reason: str = "") -> None:
        """Close the session's connection, if it has one.

        With a `reason` its client is told why this session ends though the daemon does not.
        """
        line = self._lines.pop(session, None)
        if line is None:
            return
        if reason:
            with suppress(OSError):  # it does not read, or is gone
                line.send(reason.encode(), socket.MSG_DONTWAIT)
        self._close(line)

    def close(self, *, keeps_file: bool = False) -> None:
        """Close everything without calling `on_lost`. May be called twice."""
        self.listener.close(keeps_file=keeps_file)
        for line in self._sessionless.all:
            self._close_sessionless(line)
        for session in list(self._lines):
            self.end(session)

    # --- connections without a session ------------------------------------------------------

    def _admit(self, line: socket.socket, credentials: Credentials) -> None:
        uid = credentials.uid
        if uid not in self._allowed:
            line.close()
            return
        self._timers[line] = self._loop.call_later(GREETING_SECONDS, self._close_sessionless, line)
        self._loop.add_reader(line.fileno(), self._read_token, line)
        leaving = self._sessionless.add(line, uid)
        if leaving is not None:
            self._close_sessionless(leaving)

    def _free_descriptor(self) -> None:
        """Close the oldest connection without a session, of the user who has most of them."""
        leaving = self._sessionless.oldest()
        if leaving is not None:
            self._close_sessionless(leaving)

    def _read_token(self, line: socket.socket) -> None:
        """Read the token with one call: 16 bytes of a local stream are never split."""
        found = received(line, TOKEN_BYTES + 1, MAX_DESCRIPTORS)
        if found is None:
            return
        granted, (token, descriptors) = None, found
        if len(token) == TOKEN_BYTES:
            granted = self._on_token(token, peer_credentials(line).uid, descriptors)
        else:
            close_all(descriptors)
        if granted is None:
            self._close_sessionless(line)
            return
        self._enter_session(line, *granted)

    def _enter_session(
        self, line: socket.socket, session: int, descriptors: tuple[int, ...]
    ) -> None:
        self._remove_sessionless(line)
        self._lines[session] = line
        self._loop.remove_reader(line.fileno())
        self._loop.add_reader(line.fileno(), self._receive_piece, session)
        try:
            socket.send_fds(line, [bytes([len(descriptors)])], descriptors)
        except OSError:
            self.end(session)
            self._on_lost(session)
        finally:
            close_all(descriptors)

    def _close_sessionless(self, line: socket.socket) -> None:
        self._remove_sessionless(line)
        self._close(line)

    def _remove_sessionless(self, line: socket.socket) -> None:
        """Stop counting a connection as one without a session."""
        self._sessionless.remove(line)
        self._timers.pop(line).cancel()

    # --- sessions ---------------------------------------------------------------------------

    def _receive_piece(self, session: int) -> None:
        """Take a piece, or end the lifeline: its peer is gone or breaks the protocol.

        Like the token, the piece's number is never split.
        """
        found = received(self._lines[session], PIECE_NUMBER_BYTES, 1)
        if found is None:
            return
        number, descriptors = found
        if len(number) == PIECE_NUMBER_BYTES and descriptors:
            self._on_piece(session, int.from_bytes(number, "little"), descriptors[0])
            return
        close_all(descriptors)
        self.end(session)
        self._on_lost(session)

    def _close(self, line: socket.socket) -> None:
        self._loop.remove_reader(line.fileno())
        line.close()
