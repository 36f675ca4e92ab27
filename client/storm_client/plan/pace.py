"""How quickly steps follow one another, by the clock: what they take in the end, for any reason."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Final

__all__ = ["Pace"]

STEPS: Final = 8
"""Of which the median is taken."""

SETTLING: Final = 5
"""Steps that learn and do not count. What the next ones still allocate the median leaves out."""


class Pace:
    """The time from the beginning of one step to that of the next, of the latest steps."""

    def __init__(self) -> None:
        self._begun: deque[float] = deque(maxlen=STEPS + 1)
        self._unsettled = 0

    def begins(self) -> None:
        """Note that a step begins."""
        if self._unsettled:
            self._unsettled -= 1
        else:
            self._begun.append(perf_counter())

    def begin_anew(self) -> None:
        """Forget what was noted: steps are another kind of work from here on."""
        self._begun.clear()
        self._unsettled = SETTLING

    @property
    def seconds(self) -> float | None:
        """What a step takes; None where too few have settled."""
        if len(self._begun) <= STEPS:
            return None
        return median(later - one for one, later in pairwise(list(self._begun)))
