"""How busy a GPU's link is in each direction, from the copies that were timed on it.

A copy's seconds are those that the device measured for it, so with one stream a direction their sum
is the time that the direction was busy. Totals only grow, and what "lately" means is the time since
a mark that is at least a second old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["DIRECTIONS", "Direction", "LinkMeter"]

Direction = Literal["store", "restore"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("store", "restore")
"""From the device to the pool, and back."""

_INTERVAL_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """Totals of one direction at a time."""

    at: float
    nbytes: int = 0
    busy_seconds: float = 0.0


class LinkMeter:
    """Counts the copies of one device. For any thread.

    `device` is its name here, as `cuda:0`; `uuid` is what tells it from others elsewhere.
    """

    def __init__(
        self, device: str, uuid: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.device = device
        self.uuid = uuid
        self._clock = clock
        self._lock = threading.Lock()  # protects both maps
        self._now = {one: _Mark(clock()) for one in DIRECTIONS}
        self._marks = {one: (mark, mark) for one, mark in self._now.items()}

    def copied(self, direction: Direction, nbytes: int, seconds: float) -> None:
        """Count a copy that has ended and kept the link busy for so long."""
        with self._lock:
            now = self._roll(direction)
            self._now[direction] = _Mark(now, *self._sums(direction, nbytes, seconds))

    def as_status(self) -> dict[str, Any]:
        """Return totals and the last interval of both directions, as JSON values.

        `bytes_per_second` is the speed while busy, `busy_share` how much of the interval that was.
        """
        with self._lock:
            return {one: self._status(one) for one in DIRECTIONS}

    def _sums(self, direction: Direction, nbytes: int, seconds: float) -> tuple[int, float]:
        last = self._now[direction]
        return last.nbytes + nbytes, last.busy_seconds + seconds

    def _roll(self, direction: Direction) -> float:
        """Make the present a mark where the newest is old enough; return the time."""
        now, (_, newer) = self._clock(), self._marks[direction]
        if now - newer.at >= _INTERVAL_SECONDS:
            self._marks[direction] = (newer, _Mark(now, *self._sums(direction, 0, 0.0)))
        return now

    def _status(self, direction: Direction) -> dict[str, Any]:
        now = self._roll(direction)
        total, since = self._now[direction], self._marks[direction][0]
        busy = total.busy_seconds - since.busy_seconds
        interval = now - since.at
        return {
            "bytes": total.nbytes,
            "busy_seconds": total.busy_seconds,
            "bytes_per_second": (total.nbytes - since.nbytes) / busy if busy else 0.0,
            "busy_share": min(1.0, busy / interval) if interval else 0.0,
        }
