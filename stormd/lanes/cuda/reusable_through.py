"""The number through which all sources may be reused, although stores end out of order. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["ReusableThrough"]


class ReusableThrough:
    """Increasing numbers that one thread expects and another marks as done, in any order.

    No number between two expected ones is expected later. So all numbers before the next expected
    one that is not done are done, including those that an earlier daemon has answered.
    """

    def __init__(self) -> None:
        self._expected: deque[int] = deque()
        self._done: set[int] = set()
        self._through = 0

    def expect(self, number: int) -> None:
        """Expect a number, which must be larger than all before."""
        self._expected.append(number)

    def done(self, numbers: Iterable[int]) -> int:
        """Mark numbers as done; return the number through which all are. Marking twice is fine."""
        self._done.update(number for number in numbers if number > self._through)
        while self._expected and self._expected[0] in self._done:
            self._through = self._expected.popleft()
            self._done.discard(self._through)
            if self._expected:
                self._through = self._expected[0] - 1
        return self._through
