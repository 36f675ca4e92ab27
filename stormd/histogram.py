"""How long things took, in fixed buckets.

The buckets never change while the daemon runs, so that two readings can be subtracted. An
observation costs one bisection and no allocation.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final

__all__ = ["WAIT_BOUNDS", "Histogram"]

WAIT_BOUNDS: Final = (
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    2.5e-2,
    0.05,
    0.1,
    0.25,
    1.0,
    5.0,
)
"""Upper bounds in seconds: a part of 8 MiB takes about 3 ms on the cpu lane, 1 ms on a GPU."""


class Histogram:
    """Counts of observations up to each of `bounds` (seconds, ascending), and their sum."""

    def __init__(self, bounds: tuple[float, ...] = WAIT_BOUNDS) -> None:
        self.bounds = bounds
        self.total_seconds = 0.0
        self._counts = [0] * (len(bounds) + 1)  # the last one: above every bound

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.total_seconds += seconds

    @property
    def count(self) -> int:
        """All observations."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bound as text with the observations up to it, the last bound "+Inf"."""
        names = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
