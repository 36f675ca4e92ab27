"""How many sessions each user has, and which of them have no lifeline yet.

A session takes a place from its opening until it is gone, or, where it never had a lifeline and so
holds nothing, until its end begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from stormd.ledger.sessions import Phase, Session

__all__ = ["Places"]


class Places:
    """Counts sessions with a lane and those without one apart."""

    def __init__(self) -> None:
        self._taken: dict[int, Session] = {}
        self._by_user: Counter[tuple[bool, int]] = Counter()
        self._by_kind: Counter[bool] = Counter()
        self._unattached: dict[int, Session] = {}  # the oldest first

    def taken(self, uid: int, *, has_lane: bool) -> tuple[int, int]:
        """Return how many places a user has, and how many all users have."""
        return self._by_user[has_lane, uid], self._by_kind[has_lane]

    def stalest(self, *, has_lane: bool, uid: int | None = None) -> Session | None:
        """Return the session that is longest without a lifeline, where there is such a one.

        Of a user's, or, where none is named, of the user who has most of them.
        """
        found: dict[int, list[Session]] = {}
        for record in self._unattached.values():
            if record.info.has_lane is has_lane and uid in (None, record.info.uid):
                found.setdefault(record.info.uid, []).append(record)
        return max(found.values(), key=len)[0] if found else None

    def take(self, record: Session) -> None:
        """Give a session that was opened its place."""
        session, info = record.info.session, record.info
        self._taken[session] = self._unattached[session] = record
        self._by_user[info.has_lane, info.uid] += 1
        self._by_kind[info.has_lane] += 1

    def waits(self, record: Session) -> None:
        """Note that a session that was another daemon's waits for its lifeline."""
        self._unattached[record.info.session] = record

    def attached(self, record: Session) -> None:
        """Note that a session has its lifeline."""
        del self._unattached[record.info.session]

    def leave(self, record: Session) -> None:
        """Give a session's place up. Twice is fine."""
        info = record.info
        if self._taken.pop(info.session, None) is None:
            return
        self._unattached.pop(info.session, None)
        self._by_user[info.has_lane, info.uid] -= 1
        if not self._by_user[info.has_lane, info.uid]:
            del self._by_user[info.has_lane, info.uid]
        self._by_kind[info.has_lane] -= 1

    def assert_invariants(self, records: Iterable[Session]) -> None:
        """Raise AssertionError where the places are not these sessions': for tests."""
        there = {record.info.session: record for record in records}
        assert self._taken.keys() <= there.keys()
        assert self._unattached == {
            session: record for session, record in there.items() if record.phase is Phase.OPENED
        }
        for session, record in there.items():
            assert session in self._taken or record.phase is Phase.ENDING
        held = [record.info for record in self._taken.values()]
        assert self._by_user == Counter((info.has_lane, info.uid) for info in held)
        assert +self._by_kind == Counter(info.has_lane for info in held)
