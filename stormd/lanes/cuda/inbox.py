"""Items from other threads for one waiting thread, with waits that end on time.

`SimpleQueue.get(timeout)` may not end on time before Python 3.13. If its timeout expires just as it
finds that the announced item has already been taken, it waits for the next item, possibly for ever.
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
    """Items in the order in which they were put. Any thread puts; one thread takes and waits."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._nothing_new = threading.Lock()  # held until something is put
        self._nothing_new.acquire()

    def put(self, item: Item) -> None:
        """Add an item and end the wait of the taking thread."""
        self._items.append(item)
        with suppress(RuntimeError):  # another item has released it already
            self._nothing_new.release()

    def take(self) -> Iterator[Item]:
        """Yield the items that are there."""
        while self._items:
            yield self._items.popleft()

    def wait(self, seconds: float = -1) -> None:
        """Sleep until there is an item, or for `seconds`; a wait may end early without an item."""
        if not self._items:
            self._nothing_new.acquire(timeout=seconds)
