"""A slower link than the machine has: copies count as done no sooner than they would be on it.

For measuring what a consumer's GPU on a narrow link would do, on one that has a wide one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stormd.monitoring.link_meter import Direction

__all__ = ["LinkLimit"]


class LinkLimit:
    """Says when copies of one device are over at `bytes_per_second` each way; 0 limits nothing.

    A direction carries one copy after another. For any thread.
    """

    def __init__(
        self, bytes_per_second: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds_a_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._clock = clock
        self._lock = threading.Lock()  # protects the map
        self._free: dict[Direction, float] = {}
        """When each direction has carried what was put on it."""

    def over_at(self, direction: Direction, nbytes: int) -> float:
        """Put a copy on the link; return when it is over, by the clock."""
        if not self._seconds_a_byte:
            return 0.0
        with self._lock:
            begin = max(self._clock(), self._free.get(direction, 0.0))
            self._free[direction] = begin + nbytes * self._seconds_a_byte
            return self._free[direction]

    def is_over(self, at: float) -> bool:
        """Tell whether a copy that is over at that time is so by now."""
        return not at or self._clock() >= at

    def wait(self, direction: Direction, nbytes: int) -> None:
        """Put a copy on the link, and return when it is over."""
        at = self.over_at(direction, nbytes)
        if at:
            time.sleep(max(0.0, at - self._clock()))
