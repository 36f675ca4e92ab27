"""Who of several sessions moves bytes next, so that those with work move as many. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a session's tag is what it has moved, and
whoever has the smallest goes next. One that has had nothing to do begins again where whoever went
last began, so it is served soon and makes up for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["FairShares"]


class FairShares:
    """Sessions are numbers; each is known from `enter` until `forget`."""

    def __init__(self) -> None:
        """Know none."""
        self._tags: dict[int, int] = {}
        self._now = 0
        """The tag of the session that went last, when it did."""

    def enter(self, session: int) -> None:
        """Note that a session which had none has work."""
        self._tags[session] = max(self._tags.get(session, 0), self._now)

    def next(self, sessions: Iterable[int]) -> int:
        """Return which of them goes next: of like ones the first."""
        return min(sessions, key=self._tags.__getitem__)

    def moves(self, session: int, nbytes: int) -> None:
        """Note that a session goes, with so many bytes."""
        self._now = max(self._now, self._tags[session])
        self._tags[session] += nbytes

    def forget(self, session: int) -> None:
        """Forget a session that has ended; one that never came is fine."""
        self._tags.pop(session, None)

    def __len__(self) -> int:
        """Return how many sessions are known."""
        return len(self._tags)
