"""The lifeline: a stream connection to the daemon whose end is the end of the session.

The daemon learns from it that a client has died. So one process alone may hold the client's end: a
forked child closes its copy at once, because an open one would hide its parent's death.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from storm_client.errors import DaemonUnavailable
from storm_client.transport.interrupts import Living
from stormd.protocol import distrust, peer_uid
from stormd.protocol.limits import PIECE_NUMBER_BYTES

__all__ = ["MAX_DESCRIPTORS", "Gone", "Lifeline", "NoAnswer"]

MAX_DESCRIPTORS = 8
"""More than any lane shares; received in one message."""


class NoAnswer(DaemonUnavailable):
    """Somebody listens and has not answered: a daemon that starts, or has just been killed."""


class Gone(NoAnswer):
    """There was a daemon, which has ended before it answered."""


class Lifeline:
    """A connected lifeline. Readable, in the sense of poll, means that the daemon is gone."""

    def __init__(self, connection: socket.socket) -> None:
        """Own `connection`."""
        self._socket = connection
        self._path = ""
        self.inherited = False
        """Whether this is a copy in a forked child."""
        _LIFELINES.add(self)

    @classmethod
    def attach(
        cls, path: str, token: bytes, timeout: float, shared: Sequence[int] = ()
    ) -> tuple[Lifeline, list[int]]:
        """Connect to `path` with the session's `token`; return it and the descriptors sent.

        The descriptors are the caller's to close. `shared` are those that an earlier daemon sent,
        for one that goes on with the session. The token, which opens the session, is said to no
        process but one of those users whose daemons are spoken to.

        Raises:
            NoAnswer: nobody answered within `timeout` seconds, or refused the token.
            DaemonUnavailable: who listens there is not to be told it.
        """
        lifeline = cls.connect(path, timeout)
        return lifeline, lifeline.open(token, timeout, shared)

    @classmethod
    def connect(cls, path: str, timeout: float) -> Lifeline:
        """Connect to `path`; it is readable, in the sense of poll, once the daemon there is gone.

        Raises:
            NoAnswer, DaemonUnavailable: as `attach`.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        lifeline = cls(connection)  # now, for a thread may fork before the daemon has answered
        lifeline._path = path
        with lifeline._failing(timeout):
            connection.settimeout(timeout)
            connection.connect(path)
            _check_peer(connection, path)
        return lifeline

    def open(self, token: bytes, timeout: float, shared: Sequence[int] = ()) -> list[int]:
        """Open the session of `token`; return the descriptors sent. Closed where it fails.

        Raises:
            NoAnswer: as `attach`.
        """
        with self._failing(timeout):
            self._socket.settimeout(timeout)
            socket.send_fds(self._socket, [token], shared)
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1, MAX_DESCRIPTORS)
            if not data:
                raise NoAnswer(f"the daemon closed the lifeline {self._path}; see its log")
            self._socket.setblocking(False)
        return descriptors

    def hand_over(self, number: int, descriptor: int) -> bool:
        """Send the descriptor of the piece of that number; False where it cannot leave now.

        As where the daemon has read too little, or is gone. The descriptor stays the caller's.
        """
        try:
            said = number.to_bytes(PIECE_NUMBER_BYTES, "little")
            socket.send_fds(self._socket, [said], [descriptor])
        except OSError:
            return False
        return True

    @contextmanager
    def _failing(self, timeout: float) -> Iterator[None]:
        """Close it where what is done fails, and say so in our words."""
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

    @property
    def ended(self) -> bool:
        """Whether the daemon is gone; must not be asked of a closed lifeline."""
        return self.ends_within(0.0)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the daemon's end; tell whether it has come."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def close(self) -> None:
        """End the session as far as the daemon is concerned. Calling it twice is fine."""
        self._socket.close()


def _check_peer(connection: socket.socket, path: str) -> None:
    trouble = distrust(Path(path), peer_uid(connection))
    if trouble is not None:
        raise DaemonUnavailable(f"{trouble}: {trouble.advice}")


_LIFELINES: Living[Lifeline] = Living()
"""For the fork handler alone: the lifelines of this process."""


def _close_in_child() -> None:
    for lifeline in _LIFELINES:
        lifeline.inherited = True
        lifeline.close()


os.register_at_fork(after_in_child=_close_in_child)
