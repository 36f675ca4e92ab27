"""The lifelines: one stream connection a session, whose end is the session's end.

A connection speaks for a session only after it has sent that session's token from that session's
user. The descriptors are handed over once. Whichever way the process at the other end ceases to be,
`on_lost` is called, because the kernel closes its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stormd.control import BACKLOG
from stormd.protocol.limits import TOKEN_BYTES
from stormd.runtime_directory import SocketFile

__all__ = ["GREETING_SECONDS", "LifelineListener"]

log = logging.getLogger(__name__)

GREETING_SECONDS: Final = 5.0
"""How long a connection may take to send its token."""

MAX_STRANGERS: Final = 128
"""Connections that may be without a session at one time. The oldest goes for one more: who has a
token sends it at once, and others must not keep those out by sending none."""

RETRY_SECONDS: Final = 0.1
"""Pause after the kernel refused a connection for want of descriptors."""


class LifelineListener:
    """Listens at `path` from construction on.

    `on_token(token, uid)` returns the session that the token opens and the descriptors to hand
    over, which are closed here, or None. `on_lost(session)` follows the end of an accepted
    connection, unless `end` ended it.

    Raises:
        OSError: the path cannot be bound.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        *,
        on_token: Callable[[bytes, int], tuple[int, tuple[int, ...]] | None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._path = path
        self._on_token = on_token
        self._on_lost = on_lost
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._lines: dict[int, socket.socket] = {}
        self._listener, self._file = _listening(path)
        loop.add_reader(self._listener.fileno(), self._accept)

    @property
    def is_bound(self) -> bool:
        """Whether the socket's file is there, so that clients find it."""
        return self._file.is_there

    def bind(self) -> None:
        """Make the socket's file again that was removed; connections stay as they are.

        Raises:
            OSError: the path cannot be bound; the listener is the one that it was.
        """
        listener, file = _listening(self._path)
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener, self._file = listener, file
        self._loop.add_reader(listener.fileno(), self._accept)

    def end(self, session: int) -> None:
        """Close the session's connection, if it has one."""
        line = self._lines.pop(session, None)
        if line is not None:
            self._close(line)

    def stop_listening(self) -> None:
        """Take no new connection, and remove the socket's file. Twice is fine."""
        if self._listener.fileno() < 0:
            return
        self._file.remove()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def close(self) -> None:
        """Close everything, without a call of `on_lost`. Twice is fine."""
        self.stop_listening()
        for line in list(self._strangers):
            self._dismiss(line)
        for session in list(self._lines):
            self.end(session)

    # --- strangers --------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._pause(error)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        line.setblocking(False)
        timer = self._loop.call_later(GREETING_SECONDS, self._dismiss, line)
        self._strangers[line] = timer
        self._loop.add_reader(line.fileno(), self._greet, line)

    def _pause(self, error: OSError) -> None:
        """Let the loop rest: the connection stays in the backlog, and its event with it."""
        log.warning("a lifeline was not accepted (%s): raise the limit of open files", error)
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _greet(self, line: socket.socket) -> None:
        """Read the token, all of it in one piece: 16 bytes of a local stream are never split."""
        try:
            token = line.recv(TOKEN_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            token = b""
        granted = None
        if len(token) == TOKEN_BYTES:
            granted = self._on_token(token, _peer_uid(line))
        if granted is None:
            self._dismiss(line)
            return
        self._adopt(line, *granted)

    def _adopt(self, line: socket.socket, session: int, descriptors: tuple[int, ...]) -> None:
        self._strangers.pop(line).cancel()
        self._lines[session] = line
        self._loop.remove_reader(line.fileno())
        self._loop.add_reader(line.fileno(), self._lost, session)
        try:
            socket.send_fds(line, [bytes([len(descriptors)])], descriptors)
        except OSError:
            self.end(session)
            self._on_lost(session)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _dismiss(self, line: socket.socket) -> None:
        self._strangers.pop(line).cancel()
        self._close(line)

    # --- sessions ---------------------------------------------------------------------------

    def _lost(self, session: int) -> None:
        """End a lifeline that has become readable: its peer is gone, or breaks the protocol."""
        if _is_quiet(self._lines[session]):
            return
        self.end(session)
        self._on_lost(session)

    def _close(self, line: socket.socket) -> None:
        self._loop.remove_reader(line.fileno())
        line.close()


def _listening(path: Path) -> tuple[socket.socket, SocketFile]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        return listener, SocketFile(path)
    except OSError:
        listener.close()
        raise


def _is_quiet(line: socket.socket) -> bool:
    """Return whether there is nothing to read after all: the kernel may wake us in vain."""
    try:
        line.recv(1)
    except (BlockingIOError, InterruptedError):
        return True
    except OSError:
        return False
    return False


def _peer_uid(line: socket.socket) -> int:
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, uid, _ = struct.unpack("iII", credentials)
    return int(uid)
