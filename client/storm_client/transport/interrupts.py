"""Tools that an interrupt cannot break: waiting, waking the listener, and weak sets.

A signal handler, such as that of Ctrl-C, may raise between any two steps of Python code. In a weak
reference's callback or a destructor written in Python, Python prints the exception and loses it. In
the middle of the standard library's waits, the exception leaves a lock without an owner. So nothing
of that is used here.
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

__all__ = ["SafeCondition", "SafeWeakSet", "Wakeup"]

T = TypeVar("T")


class SafeCondition:
    """Waits for the next change; call all methods with `lock` held.

    The standard library's condition variable releases the lock by one call. If a signal handler
    raises right after that call, nobody takes the lock again. Here the waiting thread holds the
    lock afterwards, however the wait has ended.

    One thread at a time may `poll` instead, which also waits for descriptors.
    """

    def __init__(self, lock: Any) -> None:
        """Release `lock`, a threading.RLock, while a thread waits."""
        self._lock = lock
        self._waiters: dict[int, threading.Lock] = {}
        self.wakeup: Wakeup | None = None
        """Ends a `poll`, whose poller must have it registered. Its owner sets and drops it."""
        self._is_signalled = False  # whether the thread that polls was woken; the lock protects it
        self.is_polled = False
        """Whether a thread is in `poll`."""

    def wait(self, seconds: float | None = None) -> None:
        """Return at the next `notify_all`, or after `seconds`."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters[id(waiter)] = waiter
        released: list[object] = []
        try:
            # One step releases the lock and keeps the state that is needed to take it again.
            released.extend(starmap(self._lock._release_save, ((),)))
            waiter.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            if released:
                self._lock._acquire_restore(*released)
            self._waiters.pop(id(waiter), None)

    def poll(self, poller: select.poll, seconds: float) -> None:
        """As `wait`, but return also when `poller` reports something."""
        wakeup = self.wakeup  # kept open until this returns
        released: list[object] = []
        try:
            self.is_polled = True
            released.extend(starmap(self._lock._release_save, ((),)))
            poller.poll(seconds * 1000)
        finally:
            self.is_polled = False
            if released:
                self._lock._acquire_restore(*released)
        if self._is_signalled and wakeup is not None:
            wakeup.clear()
            self._is_signalled = False

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        if self.is_polled and self.wakeup is not None:
            self._is_signalled = True
            self.wakeup.signal()
        for waiter in list(self._waiters.values()):
            if waiter.locked():
                waiter.release()


class Wakeup:
    """Wakes the listening thread. It takes no lock, so any code may signal, destructors included.

    Its descriptor, an eventfd's, is closed with the last reference to this object, when nobody can
    be about to write. A later write would go to a new file with the same number.
    """

    def __init__(self) -> None:
        """Start unsignalled."""
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Of the types that close a descriptor when they are freed, epoll is the one that does it
        # without a warning and without Python code, which would lose an interrupt.
        self._owner = select.epoll.fromfd(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._descriptor

    def signal(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """Reset the signal; return whether there was one."""
        try:
            return os.eventfd_read(self._descriptor) > 0
        except BlockingIOError:
            return False


class SafeWeakSet(Generic[T]):
    """A weak set. Any thread may use it, and a forked child, too: it has no lock.

    The standard library's WeakSet has a callback in Python, and a member may be freed at any moment
    of a training step.
    """

    def __init__(self) -> None:
        """Start without members."""
        self._members: dict[int, weakref.ref[T]] = {}
        self._dead: deque[weakref.ref[T]] = deque()

    def add(self, member: T) -> None:
        """Add `member` for as long as it lives, and remove the entries of dead members."""
        with suppress(IndexError):  # another thread may have taken the last
            while self._dead:
                self._members.pop(id(self._dead.popleft()), None)
        reference = weakref.ref(member, self._dead.append)
        self._members[id(reference)] = reference

    def __iter__(self) -> Iterator[T]:
        """Iterate over the living members."""
        for reference in list(self._members.values()):
            member = reference()
            if member is not None:
                yield member
