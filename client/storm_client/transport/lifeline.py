"""The lifeline: a stream connection to the daemon; its end is the end of the session.

The daemon learns from its end that a client has died. So only one process may hold the client's
end. A forked child closes its copy at once, because an open copy would hide the parent's death.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from storm_client.errors import DaemonUnavailable
from storm_client.transport.interrupts import SafeWeakSet
from stormd.protocol import distrust, peer_credentials
from stormd.protocol.limits import PIECE_NUMBER_BYTES

__all__ = ["LOOK_SECONDS", "MAX_DESCRIPTORS", "Gone", "Lifeline", "NoAnswer"]

LOOK_SECONDS = 0.1
"""Between two checks whether the session is still wanted."""

MAX_DESCRIPTORS = 8
"""More than any lane shares; all arrive in one message."""

MAX_REASON_BYTES = 256
"""Of the reason that a daemon sends before it ends a session."""


class NoAnswer(DaemonUnavailable):
    """Somebody listens but has not answered: a daemon that is starting, or was just killed."""


class Gone(NoAnswer):
    """The daemon ended before it answered."""


class Lifeline:
    """A connected lifeline. It becomes readable, as poll reports it, when the daemon is gone."""

    def __init__(self, connection: socket.socket) -> None:
        """Take ownership of `connection`."""
        self._socket = connection
        self._path = ""
        self.inherited = False
        """Whether this is a copy in a forked child."""
        _LIFELINES.add(self)

    @classmethod
    def attach(
        cls, path: str, token: bytes, timeout: float, shared: Sequence[int] = ()
    ) -> tuple[Lifeline, list[int]]:
        """Connect to `path` with the session's `token`; return the lifeline and the descriptors.

        The caller closes the descriptors that the daemon has sent. `shared` are the descriptors
        that an earlier daemon sent, for a daemon that resumes the session. The token opens the
        session, so it is sent only to processes of trusted users.

        Raises:
            NoAnswer: nobody answered within `timeout` seconds, or the daemon refused the token.
            DaemonUnavailable: the listening process is not trusted with the token.
        """
        lifeline = cls.connect(path, timeout)
        return lifeline, lifeline.open(token, timeout, shared)

    @classmethod
    def connect(cls, path: str, timeout: float) -> Lifeline:
        """Connect to `path`; the lifeline becomes readable once the daemon there is gone.

        Raises:
            NoAnswer, DaemonUnavailable: as `attach`.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        lifeline = cls(connection)  # before the daemon answers, because a thread may fork
        lifeline._path = path
        with lifeline._failing(timeout):
            connection.settimeout(timeout)
            connection.connect(path)
            _check_peer(connection, path)
        return lifeline

    def open(
        self,
        token: bytes,
        timeout: float,
        shared: Sequence[int] = (),
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Open the session of `token`; return the descriptors sent. A failure closes the lifeline.

        `is_over` is called from time to time, and says whether nobody wants the session any more.

        Raises:
            NoAnswer: as `attach`, or nobody wants the session.
        """
        deadline = time.monotonic() + timeout
        with self._failing(timeout):
            self._socket.settimeout(timeout)
            socket.send_fds(self._socket, [token], shared)
            while not self.is_readable_within(LOOK_SECONDS):
                if is_over() or time.monotonic() >= deadline:
                    raise TimeoutError("timed out")
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1, MAX_DESCRIPTORS)
            if not data:
                raise NoAnswer(f"the daemon closed the lifeline {self._path}; see its log")
            self._socket.setblocking(False)
        return descriptors

    def send_descriptor(self, number: int, descriptor: int) -> bool:
        """Send the descriptor of piece `number`; return False if it cannot be sent now.

        The daemon may have read too little, or be gone. The caller still owns the descriptor.
        """
        try:
            said = number.to_bytes(PIECE_NUMBER_BYTES, "little")
            socket.send_fds(self._socket, [said], [descriptor])
        except OSError:
            return False
        return True

    @contextmanager
    def _failing(self, timeout: float) -> Iterator[None]:
        """Close the lifeline if the body fails, and raise an error with our message."""
        try:
            yield
        except DaemonUnavailable:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise NoAnswer(
                f"the daemon's lifeline {self._path} failed within {timeout:g} s ({error}); "
                "see `stormd status` and the daemon's log"
            ) from error

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 when closed."""
        return self._socket.fileno()

    def is_readable_within(self, seconds: float) -> bool:
        """Wait for the answer to `open`, and later for the session's end; return if it has come.

        Do not ask after `close`.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    @property
    def reason(self) -> str:
        """Why the daemon has ended this session; empty if the daemon itself has ended."""
        try:
            found = self._socket.recv(MAX_REASON_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return ""
        return found.decode(errors="replace")

    def close(self) -> None:
        """End the session from the daemon's point of view. A second call has no effect."""
        self._socket.close()


def _check_peer(connection: socket.socket, path: str) -> None:
    trouble = distrust(Path(path), peer_credentials(connection).uid)
    if trouble is not None:
        raise DaemonUnavailable(f"{trouble}: {trouble.advice}")


_LIFELINES: SafeWeakSet[Lifeline] = SafeWeakSet()
"""The lifelines of this process, only for the fork handler."""


def _close_in_child() -> None:
    for lifeline in _LIFELINES:
        lifeline.inherited = True
        lifeline.close()


os.register_at_fork(after_in_child=_close_in_child)
