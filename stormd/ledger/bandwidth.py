"""How fast the disk takes what is written to it, lately. Pure.

Counted is the time in which something was under way, also what has not ended yet: a disk that
stands still is slow before it has answered.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Bandwidth"]

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
