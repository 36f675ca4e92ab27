"""A Unix socket that listens: each connection comes with whose it is, as the kernel says.

Its file may be removed behind its back and made again; what is connected stays. A lack of
descriptors is waited out, and never ends it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from stormd.errors import remedy
from stormd.runtime_directory import SocketFile

__all__ = ["Credentials", "Listener", "peer_credentials"]

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
"""Connections that may wait to be accepted. One more is refused at once, and its client takes the
daemon for absent. The kernel allows as many since Linux 5.4."""

ACCEPTED_A_TURN: Final = 64
"""Connections accepted before the loop gets to other work."""

RETRY_SECONDS: Final = 0.1
"""Pause after the kernel refused a connection for want of descriptors."""


class Credentials(NamedTuple):
    """Whose process it is, as the kernel says; `pid` 0 where it is of another namespace."""

    uid: int
    gid: int
    pid: int


def peer_credentials(line: socket.socket) -> Credentials:
    """Return who connected a Unix socket's other end."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, gid = struct.unpack("iII", found)
    return Credentials(uid=uid, gid=gid, pid=pid)


class Listener:
    """Listens at `path` from construction on; `start` begins to accept.

    `on_line` gets each connection, which does not block, and whose it is. `on_lack` is called where
    there is no descriptor for one, which then waits. `listening` is a socket that is bound there
    already, if there is one.

    Raises:
        OSError: the path cannot be bound.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        *,
        listening: socket.socket | None = None,
        on_line: Callable[[socket.socket, Credentials], None],
        on_lack: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._path = path
        self._on_line = on_line
        self._on_lack = on_lack
        self._is_started = False
        if listening is None:
            self._socket, self._file = _listening(path)
        else:
            listening.setblocking(False)
            self._socket, self._file = listening, SocketFile(path)

    @property
    def descriptor(self) -> int:
        """That of the socket, to be kept by others."""
        return self._socket.fileno()

    @property
    def is_bound(self) -> bool:
        """Whether the socket's file is there, so that clients find it."""
        return self._file.is_there

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._socket.fileno() >= 0

    def start(self) -> None:
        """Begin to accept."""
        self._is_started = True
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def bind(self) -> None:
        """Make the socket's file again that was removed; connections stay as they are.

        Raises:
            OSError: the path cannot be bound; the listener is the one that it was.
        """
        listening, file = _listening(self._path)
        self._shut()
        self._socket, self._file = listening, file
        if self._is_started:
            self.start()

    def close(self, *, keeps_file: bool = False) -> None:
        """Take no new connection, and remove the socket's file. Twice is fine.

        It `keeps_file` where somebody else has the socket, too.
        """
        if self.is_open:
            if not keeps_file:
                self._file.remove()
            self._shut()

    def _shut(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_A_TURN):
            try:
                line, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            line.setblocking(False)
            self._on_line(line, peer_credentials(line))

    def _pause(self, error: OSError) -> None:
        """Let the loop rest: the connection stays in the backlog, and its event with it."""
        log.warning("a connection was not accepted: %s", remedy(error, "it is tried again"))
        self._loop.remove_reader(self._socket.fileno())
        self._on_lack()
        self._loop.call_later(RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        if self.is_open:
            self.start()


def _listening(path: Path) -> tuple[socket.socket, SocketFile]:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.bind(str(path))
        listening.listen(BACKLOG)
        return listening, SocketFile(path)
    except OSError:
        listening.close()
        raise
