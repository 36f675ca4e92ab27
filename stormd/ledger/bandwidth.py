"""What the disk has been handed in one direction, and how fast that went lately. Pure.

Counted is the time in which something was under way, also what has not ended yet: a disk that
stands still is slow before it has answered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from stormd.ledger.on_disk import OnDisk

__all__ = ["Bandwidth", "Direction"]

MOVING_BYTES: Final = 64 << 20
MOVING_MOST: Final = 64
"""Handed to the tier at one time in each direction, in bytes and blobs: enough for every thread to
find the next, little enough that what is asked for does not wait long behind it."""

_HALVED_SECONDS: Final = 2.0
"""Of busy time, after which what was before counts half."""


class Bandwidth:
    """Of one direction. `now` in seconds of a clock that does not step back."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.busy_seconds = 0.0
        self._under_way = 0
        self._marked = 0.0
        self._nbytes = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """Note that a transfer begins."""
        self._mark(now)
        self._under_way += 1

    def end(self, now: float, nbytes: int) -> None:
        """Note that a transfer has ended, and what it has moved: 0 where it failed."""
        self._mark(now)
        self._under_way -= 1
        self.total_bytes += nbytes
        self._nbytes += nbytes
        if self._seconds > _HALVED_SECONDS:
            self._seconds /= 2
            self._nbytes /= 2

    def a_second(self, now: float) -> float | None:
        """Return the bytes a second of busy time; None before anything was moved."""
        if not self.total_bytes:
            return None
        waiting = now - self._marked if self._under_way else 0.0
        return self._nbytes / max(self._seconds + waiting, 1e-9)

    def _mark(self, now: float) -> None:
        if self._under_way:
            self._seconds += now - self._marked
            self.busy_seconds += now - self._marked
        self._marked = now


@dataclass(slots=True)
class Direction:
    """What the tier has been handed of one direction, and how fast that went."""

    count: int = 0
    nbytes: int = 0
    by_session: Counter[int] = field(default_factory=Counter)
    speed: Bandwidth = field(default_factory=Bandwidth)

    @property
    def has_room(self) -> bool:
        """Whether the tier may be handed more."""
        return self.nbytes < MOVING_BYTES and self.count < MOVING_MOST

    def begin(self, place: OnDisk, now: float) -> None:
        """Note that a blob is handed to it."""
        self.count += 1
        self.nbytes += place.room
        self.by_session[place.session] += place.room
        self.speed.begin(now)

    def end(self, place: OnDisk, now: float, moved: int) -> None:
        """Note that it is done with it, and how much it has moved: 0 where that failed."""
        self.count -= 1
        self.nbytes -= place.room
        self.by_session[place.session] -= place.room
        if not self.by_session[place.session]:
            del self.by_session[place.session]
        self.speed.end(now, moved)

    def as_status(self, now: float) -> dict[str, Any]:
        """Return bytes and speed, as JSON values."""
        return {
            "bytes": self.speed.total_bytes,
            "busy_seconds": self.speed.busy_seconds,
            "bytes_per_second": self.speed.a_second(now) or 0.0,
        }
