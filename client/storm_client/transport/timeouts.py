"""How long a thread waits for the daemon's answers to its requests."""

from __future__ import annotations

import time

from storm_client.transport.connection import Connection
from storm_client.transport.transfers import Transfers

__all__ = ["LONGEST_SECONDS", "STALL_SECONDS", "Patience"]

STALL_SECONDS = 60.0
"""How long a restore is waited for while the daemon answers nothing."""

LONGEST_SECONDS = 600.0
"""The same while the daemon answers others: many processes may share a device by time slices."""


class Patience:
    """A thread's wait for a daemon: it ends when the daemon has not answered for a long time."""

    def __init__(self, connection: Connection, transfers: Transfers) -> None:
        """Start now; the session's lock is held here and in `wait`."""
        self._connection = connection
        self._transfers = transfers
        self._answered = transfers.answered
        now = time.monotonic()
        self._deadline, self._last = now + STALL_SECONDS, now + LONGEST_SECONDS

    def wait(self) -> bool:
        """Wait until an answer may have come; return False at the end of patience.

        Raises:
            DaemonLost, UsageError: as Connection.wait.
        """
        if self._connection.wait(min(self._deadline, self._last)):
            return True
        answered, self._answered = self._answered, self._transfers.answered
        self._deadline = time.monotonic() + STALL_SECONDS
        return answered != self._answered and time.monotonic() < self._last
