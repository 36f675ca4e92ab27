"""Through which number all sources may be used again, where some may out of turn: pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["Turns"]


class Turns:
    """Numbers that rise, expected by one thread and done by another, in whatever order.

    Between two that are expected none follows later: all through the one before the next that is
    not done are done, those that an earlier daemon has answered included.
    """

    def __init__(self) -> None:
        self._expected: deque[int] = deque()
        self._done: set[int] = set()
        self._through = 0

    def expect(self, number: int) -> None:
        """Expect a number, which is larger than all before."""
        self._expected.append(number)

    def done(self, numbers: Iterable[int]) -> int:
        """Note numbers as done; return the one through which all are. Doing so again is fine."""
        self._done.update(number for number in numbers if number > self._through)
        while self._expected and self._expected[0] in self._done:
            self._through = self._expected.popleft()
            self._done.discard(self._through)
            if self._expected:
                self._through = self._expected[0] - 1
        return self._through
