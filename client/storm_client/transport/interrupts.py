"""What an interrupt cannot break: waiting, waking the listener, and knowing what still lives.

A signal's handler, as that of Ctrl-C, may raise between any two steps of Python's code. In a weak
reference's callback or a destructor that is written in Python, the exception is printed and lost;
in the midst of the standard library's own waits it leaves a lock with nobody. So none of that is
used here.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import starmap
from typing import Any, Generic, TypeVar

__all__ = ["Changes", "Living", "Wakeup"]

T = TypeVar("T")


class Changes:
    """Waits for the next change; all methods are called with `lock` held.

    The standard library's condition variable lets go of the lock by a call of its own, and an
    exception that a signal's handler raises right behind that call finds nobody who takes it again.
    Here whoever waits has the lock afterwards, whatever has ended the wait.
    """

    def __init__(self, lock: Any) -> None:
        """Let go of `lock`, a threading.RLock, while somebody waits."""
        self._lock = lock
        self._waiters: dict[int, threading.Lock] = {}

    def wait(self, seconds: float | None = None) -> None:
        """Return at the next `notify_all`, after `seconds` at the latest."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters[id(waiter)] = waiter
        released: list[object] = []
        try:
            # In one step: the lock is let go and what it takes to have it again is kept.
            released.extend(starmap(self._lock._release_save, ((),)))
            waiter.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            if released:
                self._lock._acquire_restore(*released)
            self._waiters.pop(id(waiter), None)

    def notify_all(self) -> None:
        """Have everybody who waits look again."""
        for waiter in list(self._waiters.values()):
            if waiter.locked():
                waiter.release()


class Wakeup:
    """Wakes the listening thread: any code may signal, a destructor's too, for it takes no lock.

    Its descriptor, an eventfd's, is closed with the last reference to it, when nobody can be about
    to write: a late signal would land in whatever has been opened under that number since.
    """

    def __init__(self) -> None:
        """Start unsignalled."""
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Of what Python's own types close when they die, the one that does it without a warning,
        # and without code in Python: that would lose an interrupt.
        self._owner = select.epoll.fromfd(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._descriptor

    def signal(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """Take the signal back; return whether there was one."""
        try:
            return os.eventfd_read(self._descriptor) > 0
        except BlockingIOError:
            return False


class Living(Generic[T]):
    """Knows its members weakly. Any thread may use it, a forked child too: there is no lock.

    The standard library's WeakSet has a callback in Python, and a member may die at any moment of a
    training step.
    """

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
