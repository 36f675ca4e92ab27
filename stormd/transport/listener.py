"""A listening Unix socket; each accepted connection comes with its owner, as the kernel says.

The socket's file may be removed by others and made again; existing connections are not affected.
When file descriptors run out, the listener waits and tries again; it never ends for that reason.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stormd.errors import error_with_remedy
from stormd.protocol import Credentials, peer_credentials
from stormd.runtime_directory import SocketFile

__all__ = ["Listener", "received"]

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
"""Maximum connections that wait to be accepted. One more is refused at once, and its client takes
the daemon for absent. The kernel allows as many since Linux 5.4."""

ACCEPTED_A_TURN: Final = 64
"""Maximum connections accepted before the loop gets to other work."""

RETRY_SECONDS: Final = 0.1
"""Pause after the kernel refused a connection because descriptors ran out."""


def received(line: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]] | None:
    """Return what one call reads from a Unix socket: bytes, and up to `most` descriptors.

    There are no bytes if the other end is closed or broken. Returns None if nothing has come.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(line, nbytes, most, socket.MSG_CMSG_CLOEXEC)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b"", []
    return data, descriptors


class Listener:
    """Listens at `path` from construction on; `start` begins to accept.

    `on_accepted` receives each connection, which is non-blocking, with its owner.
    `on_out_of_descriptors` is called when no descriptor is free for a connection, which then waits.
    `listening` is a socket that is already bound there, if there is one.

    Raises:
        OSError: the path cannot be bound.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        *,
        listening: socket.socket | None = None,
        on_accepted: Callable[[socket.socket, Credentials], None],
        on_out_of_descriptors: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._path = path
        self._on_accepted = on_accepted
        self._on_out_of_descriptors = on_out_of_descriptors
        self._is_started = False
        if listening is None:
            self._socket, self._file = _listening(path)
        else:
            listening.setblocking(False)
            self._socket, self._file = listening, SocketFile(path)

    @property
    def descriptor(self) -> int:
        """The socket's descriptor, for another process to keep."""
        return self._socket.fileno()

    @property
    def is_bound(self) -> bool:
        """Whether the socket's file exists, so that clients find it."""
        return self._file.is_there

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called yet."""
        return self._socket.fileno() >= 0

    def start(self) -> None:
        """Begin to accept connections."""
        self._is_started = True
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def bind(self) -> None:
        """Make the socket's file again after its removal; connections are not affected.

        Raises:
            OSError: the path cannot be bound; the listener is unchanged.
        """
        listening, file = _listening(self._path)
        self._shut()
        self._socket, self._file = listening, file
        if self._is_started:
            self.start()

    def close(self, *, keeps_file: bool = False) -> None:
        """Accept no new connection, and remove the socket's file. May be called twice.

        Pass `keeps_file` if another process has the socket, too.
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
            self._on_accepted(line, peer_credentials(line))

    def _pause(self, error: OSError) -> None:
        """Pause accepting: the connection waits in the backlog and would wake the loop at once."""
        log.warning(
            "a connection was not accepted: %s", error_with_remedy(error, "it is tried again")
        )
        self._loop.remove_reader(self._socket.fileno())
        self._on_out_of_descriptors()
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
