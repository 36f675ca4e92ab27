"""How the sessions' holdings add up: by user, and beyond what each session has for itself.

What stays true: a session that holds no more than its share takes nothing of the common part of
the pool, so where all shares and the common part fit into the pool, a share is never refused.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Shares"]


class Shares:
    """Sums over sessions, kept up as they change. Sizes are bytes of the pool."""

    def __init__(self) -> None:
        self._share = 0
        self._by_user: dict[int, int] = {}
        self._common = 0

    @property
    def common_bytes(self) -> int:
        """What all sessions hold beyond their shares."""
        return self._common

    def of_user(self, uid: int) -> int:
        """Return what all sessions of a user hold."""
        return self._by_user.get(uid, 0)

    def limit(self, share_bytes: int, used: Iterable[int]) -> None:
        """Hold to another share; `used` is what each session holds."""
        self._share = share_bytes
        self._common = sum(self._beyond(one) for one in used)

    def moved(self, uid: int, before: int, after: int) -> None:
        """Note that a session of the user's holds another number of bytes."""
        total = self.of_user(uid) + after - before
        if total:
            self._by_user[uid] = total
        else:
            self._by_user.pop(uid, None)
        self._common += self.taken(before, after)

    def taken(self, before: int, after: int) -> int:
        """Return by how much the common part shrinks where a session goes from one to the other."""
        return max(after, self._share) - max(before, self._share)

    def assert_invariants(self, sessions: Iterable[tuple[int, int]]) -> None:
        """Raise AssertionError where the sums are not those of these users' sessions: for tests."""
        by_user: dict[int, int] = {}
        common = 0
        for uid, used in sessions:
            by_user[uid] = by_user.get(uid, 0) + used
            common += self._beyond(used)
        assert self._by_user == {uid: used for uid, used in by_user.items() if used}
        assert self._common == common

    def _beyond(self, used: int) -> int:
        return max(0, used - self._share)
