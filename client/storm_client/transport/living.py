"""A set that knows its members weakly and forgets the dead without Python code in their death.

The standard library's WeakSet has a callback in Python. An exception that a signal's handler raises
in one, as Ctrl-C does, is printed and lost, and a member may die at any moment of a training step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["Living"]

T = TypeVar("T")


class Living(Generic[T]):
    """The members that live. Any thread may use it, a forked child too: there is no lock."""

    def __init__(self) -> None:
        """Start without members."""
        self._members: dict[int, weakref.ref[T]] = {}
        self._dead: deque[weakref.ref[T]] = deque()

    def add(self, member: T) -> None:
        """Know `member` for as long as it lives, and let go of what is left of the dead."""
        with suppress(IndexError):  # another thread may have taken the last
            while self._dead:
                self._members.pop(id(self._dead.popleft()), None)
        reference = weakref.ref(member, self._dead.append)
        self._members[id(reference)] = reference

    def __iter__(self) -> Iterator[T]:
        """Go over those that live now."""
        for reference in list(self._members.values()):
            member = reference()
            if member is not None:
                yield member
