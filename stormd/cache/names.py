"""Which names a user may read, in order: lists the shared cache's names without searching all.

Each item's name is in two sorted lists, its owner's and its group's. So the cost of a page depends
on the page's size, not on how many names other users have.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from itertools import groupby, islice

__all__ = ["NameIndex"]


class NameIndex:
    """Sorted names by user and by group; several owners in a group may have one name."""

    def __init__(self) -> None:
        self._of_user: dict[int, list[str]] = {}
        self._of_group: dict[int, list[str]] = {}

    def add(self, name: str, uid: int, gid: int) -> None:
        """Note that this user of this group has an item of that name."""
        insort(self._of_user.setdefault(uid, []), name)
        insort(self._of_group.setdefault(gid, []), name)

    def remove(self, name: str, uid: int, gid: int) -> None:
        """Undo one `add`."""
        _remove(self._of_user, uid, name)
        _remove(self._of_group, gid, name)

    def page(self, uid: int, gid: int, after: str, limit: int) -> tuple[list[str], bool]:
        """Return the first names after `after` that the user may read, and whether none follow."""
        both = heapq.merge(
            *(
                islice(names, bisect_right(names, after), None)
                for names in (self._of_user.get(uid, []), self._of_group.get(gid, []))
            )
        )
        found = [name for name, _ in islice(groupby(both), limit + 1)]
        return found[:limit], len(found) <= limit


def _remove(lists: dict[int, list[str]], key: int, name: str) -> None:
    names = lists[key]
    place = bisect_left(names, name)
    assert names[place] == name
    del names[place]
    if not names:
        del lists[key]
