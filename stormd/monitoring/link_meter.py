"""How busy a GPU's link is in each direction, from the copies that were timed on it.

Beside it, how fast the GPU encodes and decodes.

The device measures the seconds of each copy. With one stream per direction, their sum is the time
that the direction was busy. Totals only grow. Recent figures are those since a mark that is at
least a second old.

GPUs that share a PCIe switch or a host bridge also share its bandwidth, and the hardware divides
it: what one GPU does not use, the others get. So a copy's seconds show the bandwidth that a device
has now, whoever else copies. Nobody needs to know which devices share a link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["DIRECTIONS", "MIN_COPIED", "Direction", "LinkLimit", "LinkMeter"]

Direction = Literal["store", "restore"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("store", "restore")
"""From the device to the pool, and back."""

_INTERVAL_SECONDS: Final = 1.0

_HALVED_SECONDS: Final = 1.0
"""Busy time after which earlier copies count half in the recent speed."""

MIN_COPIED: Final = 64 << 20
"""Least bytes copied in a direction before its speed is reported."""

LARGE_BYTES: Final = 8 << 20
"""Least bytes of a copy that shows the link's speed: a copy of 1 MiB spends a third of its time on
its start. So another plan, with smaller copies, is not mistaken for a slower link. The same holds
for the codec's kernels."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Totals of one direction at one point in time."""

    at: float
    nbytes: int = 0
    busy_seconds: float = 0.0


class LinkMeter:
    """Counts the copies of one device. For any thread.

    `device` is its name in this process, as `cuda:0`; `uuid` identifies it everywhere. `initial` is
    the speed in bytes a second that is reported before enough was copied.
    """

    def __init__(
        self,
        device: str,
        uuid: str,
        *,
        initial: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = device
        self.uuid = uuid
        self._initial = initial
        self._clock = clock
        self._lock = threading.Lock()  # protects the maps
        self._now = {one: _Mark(clock()) for one in DIRECTIONS}
        self._marks = {one: (mark, mark) for one, mark in self._now.items()}
        self._of_late = dict.fromkeys(DIRECTIONS, (0.0, 0.0))
        """Bytes and busy seconds of large copies; older copies count less."""
        self._large_bytes = dict.fromkeys(DIRECTIONS, 0)
        self._coding_seconds: dict[Direction, float] = {}
        """Least seconds a byte that a batch has needed: other kernels delay most."""

    def coded(self, direction: Direction, nbytes: int, seconds: float) -> None:
        """Count `nbytes` of tensors that the device has encoded or decoded in `seconds`."""
        if nbytes >= LARGE_BYTES and seconds > 0.0:
            with self._lock:
                least = self._coding_seconds.get(direction, seconds / nbytes)
                self._coding_seconds[direction] = min(least, seconds / nbytes)

    def coded_per_second(self) -> int:
        """Return how many bytes a second the device encodes and decodes, one after the other.

        The speed is that of an otherwise idle device; 0 until both have been measured.
        """
        with self._lock:
            seconds = [self._coding_seconds.get(one, 0.0) for one in DIRECTIONS]
        return int(1 / sum(seconds)) if all(seconds) else 0

    def copied(self, direction: Direction, nbytes: int, seconds: float) -> None:
        """Count a copy that has ended and kept the link busy for `seconds`."""
        with self._lock:
            now = self._roll(direction)
            self._now[direction] = _Mark(now, *self._sums(direction, nbytes, seconds))
            if nbytes >= LARGE_BYTES:
                self._large_bytes[direction] += nbytes
                before, busy = self._of_late[direction]
                weight = 0.5 if busy > _HALVED_SECONDS else 1.0
                self._of_late[direction] = weight * before + nbytes, weight * busy + seconds

    def bytes_per_second(self) -> int:
        """Return the speed of the slower direction while it was busy with recent large copies.

        If few copies were large, all copies since the start count. Until a direction has copied
        enough, the speed is the initial one. It does not change while nothing is copied.
        """
        with self._lock:
            sums = [
                self._of_late[one]
                if self._large_bytes[one] >= MIN_COPIED
                else (self._now[one].nbytes, self._now[one].busy_seconds)
                for one in DIRECTIONS
                if self._now[one].nbytes >= MIN_COPIED
            ]
        return int(min((nbytes / max(busy, 1e-9) for nbytes, busy in sums), default=self._initial))

    def as_status(self) -> dict[str, Any]:
        """Return totals and the last interval of both directions, as JSON values.

        `bytes_per_second` is the speed while busy, `busy_share` the busy share of the interval.
        """
        with self._lock:
            return {one: self._status(one) for one in DIRECTIONS}

    def _sums(self, direction: Direction, nbytes: int, seconds: float) -> tuple[int, float]:
        last = self._now[direction]
        return last.nbytes + nbytes, last.busy_seconds + seconds

    def _roll(self, direction: Direction) -> float:
        """Set a new mark if the newest one is old enough; return the present time."""
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
    """Simulates a slower link than the machine has, to measure what a consumer's GPU would do.

    It computes when copies of one device end at `bytes_per_second` each way; 0 limits nothing.

    A direction carries one copy after another. For any thread.
    """

    def __init__(
        self, bytes_per_second: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()  # protects the map and the limit
        self._free: dict[Direction, float] = {}
        """The time at which each direction has carried all its copies so far."""

    def change(self, bytes_per_second: int) -> None:
        """Change the speed for copies that begin from now on, on an idle link; 0 for no limit."""
        with self._lock:
            self.bytes_per_second = bytes_per_second
            self._free.clear()

    def end_time(self, direction: Direction, nbytes: int) -> float:
        """Put a copy on the link; return the clock's time at its end, 0.0 without a limit."""
        with self._lock:
            limit = self.bytes_per_second
            if not limit:
                return 0.0
            begin = max(self._clock(), self._free.get(direction, 0.0))
            self._free[direction] = begin + nbytes / limit
            return self._free[direction]

    def has_ended(self, at: float) -> bool:
        """Return whether the copy whose end `end_time` returned as `at` has ended by now."""
        return not at or self._clock() >= at

    def wait(self, direction: Direction, nbytes: int) -> None:
        """Put a copy on the link, and wait until it has ended."""
        at = self.end_time(direction, nbytes)
        if at:
            time.sleep(max(0.0, at - self._clock()))
