"""Connections without a session: how many there may be, and which one is closed for one more.

A new connection always finds a place, however many idle ones there are: the oldest connection of
the user who has most of them is closed. So no user takes another user's places.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Sessionless"]

Key = TypeVar("Key")


class Sessionless(Generic[Key]):
    """At most `max_all` connections, and `max_of_user` of each user, in order of arrival."""

    def __init__(self, max_all: int, max_of_user: int) -> None:
        self._max_all = max_all
        self._max_of_user = max_of_user
        self._by_user: dict[int, dict[Key, None]] = {}
        self._users: dict[Key, int] = {}

    @property
    def all(self) -> list[Key]:
        """All of them, the oldest first."""
        return list(self._users)

    def add(self, key: Key, uid: int) -> Key | None:
        """Add a user's connection; return the one that must be closed for it, or None."""
        self._users[key] = uid
        own = self._by_user.setdefault(uid, {})
        own[key] = None
        if len(own) > self._max_of_user:
            return next(iter(own))
        return self.oldest() if len(self._users) > self._max_all else None

    def remove(self, key: Key) -> None:
        """Remove a connection, if it is in the list."""
        uid = self._users.pop(key, None)
        if uid is None:
            return
        own = self._by_user[uid]
        del own[key]
        if not own:
            del self._by_user[uid]

    def oldest(self) -> Key | None:
        """Return the oldest connection of the user who has most; None if there is none."""
        most = max(self._by_user.values(), key=len, default=None)
        return None if most is None else next(iter(most))
