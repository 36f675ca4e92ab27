"""What other threads hand to the one that waits for it, with waits that end when they should.

`SimpleQueue.get(timeout)` may not, before Python 3.13: where its time is over just as it finds that
what it was told of has been taken already, it waits on for the next item, for ever if none comes.
With waits as short as a pipeline's, a busy host had that once in some 500 batches of stores.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["Inbox"]

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Items in the order in which they were put. Any thread puts, one takes and waits."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._nothing_new = threading.Lock()  # held until something is put
        self._nothing_new.acquire()

    @property
    def is_empty(self) -> bool:
        """Whether all has been taken."""
        return not self._items

    def put(self, item: Item) -> None:
        """Add an item, and end the wait for it."""
        self._items.append(item)
        with suppress(RuntimeError):  # it was let go by another item, which no wait has ended for
            self._nothing_new.release()

    def take(self) -> Iterator[Item]:
        """Yield the items that are there."""
        while not self.is_empty:
            yield self._items.popleft()

    def wait(self, seconds: float = -1) -> None:
        """Sleep until there is an item, or for `seconds`; a wait may end early, for nothing."""
        if self.is_empty:
            self._nothing_new.acquire(timeout=seconds)
