"""How busy a GPU's link is in each direction, from the copies that were timed on it.

A copy's seconds are those that the device measured for it, so with one stream a direction their sum
is the time that the direction was busy. Totals only grow, and what "lately" means is the time since
a mark that is at least a second old.

GPUs that share a PCIe switch or a host bridge take bandwidth from each other, and the hardware
deals it out: what one leaves, the others have. So a copy's seconds say what a device has of it
now, whoever else copies, and nobody needs to know what is shared with whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["DIRECTIONS", "LEAST_COPIED", "Direction", "LinkLimit", "LinkMeter"]

Direction = Literal["store", "restore"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("store", "restore")
"""From the device to the pool, and back."""

_INTERVAL_SECONDS: Final = 1.0

_HALVED_SECONDS: Final = 1.0
"""Of busy time, after which what was copied before counts half in the speed of late."""

LEAST_COPIED: Final = 64 << 20
"""Bytes each way from which on a speed is told."""

LARGE_BYTES: Final = 8 << 20
"""From which on a copy shows what the link carries: one of 1 MiB begins for a third of its time. So
another plan, with smaller copies, is not taken for a slower link."""


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
        self._lock = threading.Lock()  # protects the maps
        self._now = {one: _Mark(clock()) for one in DIRECTIONS}
        self._marks = {one: (mark, mark) for one, mark in self._now.items()}
        self._of_late = dict.fromkeys(DIRECTIONS, (0.0, 0.0))
        """Bytes and busy seconds of large copies, of which older ones count less."""
        self._large_bytes = dict.fromkeys(DIRECTIONS, 0)

    def copied(self, direction: Direction, nbytes: int, seconds: float) -> None:
        """Count a copy that has ended and kept the link busy for so long."""
        with self._lock:
            now = self._roll(direction)
            self._now[direction] = _Mark(now, *self._sums(direction, nbytes, seconds))
            if nbytes >= LARGE_BYTES:
                self._large_bytes[direction] += nbytes
                before, busy = self._of_late[direction]
                weight = 0.5 if busy > _HALVED_SECONDS else 1.0
                self._of_late[direction] = weight * before + nbytes, weight * busy + seconds

    def bytes_per_second(self) -> int:
        """Return the speed of the slower direction while it was busy with large copies of late.

        Of all since the start where few were large; 0 where neither direction has copied enough. It
        stays as it is while nothing is copied.
        """
        with self._lock:
            sums = [
                self._of_late[one]
                if self._large_bytes[one] >= LEAST_COPIED
                else (self._now[one].nbytes, self._now[one].busy_seconds)
                for one in DIRECTIONS
                if self._now[one].nbytes >= LEAST_COPIED
            ]
        return int(min((nbytes / max(busy, 1e-9) for nbytes, busy in sums), default=0))

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


class LinkLimit:
    """A slower link than the machine has, to measure what a consumer's GPU would do.

    Says when copies of one device are over at `bytes_per_second` each way; 0 limits nothing.

    A direction carries one copy after another. For any thread.
    """

    def __init__(
        self, bytes_per_second: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()  # protects the map and the limit
        self._free: dict[Direction, float] = {}
        """When each direction has carried what was put on it."""

    def change(self, bytes_per_second: int) -> None:
        """Have copies that begin from now on find an idle link of that speed; 0 for no limit."""
        with self._lock:
            self.bytes_per_second = bytes_per_second
            self._free.clear()

    def over_at(self, direction: Direction, nbytes: int) -> float:
        """Put a copy on the link; return when it is over, by the clock."""
        with self._lock:
            limit = self.bytes_per_second
            if not limit:
                return 0.0
            begin = max(self._clock(), self._free.get(direction, 0.0))
            self._free[direction] = begin + nbytes / limit
            return self._free[direction]

    def is_over(self, at: float) -> bool:
        """Tell whether a copy that is over at that time is so by now."""
        return not at or self._clock() >= at

    def wait(self, direction: Direction, nbytes: int) -> None:
        """Put a copy on the link, and return when it is over."""
        at = self.over_at(direction, nbytes)
        if at:
            time.sleep(max(0.0, at - self._clock()))
