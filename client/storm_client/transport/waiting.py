"""A condition variable that Ctrl-C cannot leave without its lock.

The standard library's lets go of the lock by a call of its own, and an exception that a signal's
handler raises right behind that call finds nobody who takes it again. Here whoever waits has the
lock afterwards, whatever has ended the wait.
"""

from __future__ import annotations

import threading
from itertools import starmap
from typing import Any

__all__ = ["Changes"]


class Changes:
    """Waits for the next change; all methods are called with `lock` held."""

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
