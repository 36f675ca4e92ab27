"""When to look for a daemon again after one was lost; pure, told of time and of what was found.

An outage is announced once, and every step that begins asks whether to look. So attempts are made
one at a time, and begin ATTEMPT_SECONDS apart or more.
"""

from __future__ import annotations

__all__ = ["ATTEMPT_SECONDS", "Outage"]

ATTEMPT_SECONDS = 1.0
"""Between the beginnings of two attempts."""


class Outage:
    """The outages of one client. `now` is in seconds of any clock that does not step back."""

    def __init__(self) -> None:
        """Start with a daemon that answers."""
        self._announced = False
        self._trying = False
        self._next = float("-inf")

    def announce(self) -> bool:
        """Note that the daemon is lost; tell whether that is news."""
        news = not self._announced
        self._announced = True
        return news

    def attempt(self, now: float) -> bool:
        """Tell whether an attempt is due; one that is has begun with that."""
        if self._trying or now < self._next:
            return False
        self._trying = True
        self._next = now + ATTEMPT_SECONDS
        return True

    def attempted(self) -> None:
        """Note that the attempt under way has ended, however it did."""
        self._trying = False

    def end(self) -> None:
        """Note that there is a daemon again: the next loss is another outage."""
        self._announced = False
