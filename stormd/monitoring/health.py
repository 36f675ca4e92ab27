"""Whether the daemon's worker threads still make progress.

A worker is reported if it has been at one job for longer than the limit, or if its thread has ended
without being told to. An idle worker is healthy, however long it waits. Python cannot end a thread,
so a stuck worker is reported to whoever can restart the process.

A process that was stopped, as in a paused container, finds all its workers late when it continues.
So a worker is reported only if it is still late a second later.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

__all__ = ["STUCK_SECONDS", "Heartbeat", "stuck_workers"]

STUCK_SECONDS: Final = 30.0
"""How long one job may take. The largest entry is 1 GiB, and the slowest codec, the NumPy
reference, encodes 0.05 GB/s: 21 s."""

CONFIRM_SECONDS: Final = 1.0
"""How long a worker must stay at its job once it was found late."""


class Heartbeat:
    """One worker's sign of life: the worker enters it around each job, and the loop reads it.

    Its worker writes `_since` and `_ended`, and the loop reads them without a lock: both are single
    references, which the interpreter replaces as a whole. `_late` is the loop's own: the begin of
    the job that was found late, and when it was.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._since: float | None = None
        self._ended = ""
        self._late = (0.0, 0.0)

    @property
    def is_resting(self) -> bool:
        """Whether the worker has no job."""
        return self._since is None

    def work(self) -> None:
        """Note that a job begins or has made progress."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """Note that there is no job."""
        self._since = None

    def __enter__(self) -> None:
        self.work()

    def __exit__(self, *_: object) -> None:
        self.rest()

    def ended(self, reason: str) -> None:
        """Record that the worker's thread ends without being told to."""
        self._ended = reason

    def trouble(self, limit_seconds: float = STUCK_SECONDS) -> str:
        """Return what is wrong with the worker, empty if nothing is."""
        if self._ended:
            return f"{self.name} has ended: {self._ended}"
        since, now = self._since, time.monotonic()
        busy = 0.0 if since is None else now - since
        if since is None or busy <= limit_seconds:
            return ""
        if self._late[0] != since:
            self._late = since, now
        if now - self._late[1] < CONFIRM_SECONDS:
            return ""
        return f"{self.name} has been at one job for {busy:.0f} s, limit {limit_seconds:.0f} s"


def stuck_workers(
    heartbeats: Iterable[Heartbeat], limit_seconds: float = STUCK_SECONDS
) -> list[str]:
    """Return one sentence for each worker that is stuck or has ended."""
    return [trouble for heartbeat in heartbeats if (trouble := heartbeat.trouble(limit_seconds))]
