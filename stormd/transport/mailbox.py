"""Carries results from worker threads to the event loop, in batches.

Every item posted before `close` is delivered on the loop, once and in order. The loop is woken once
for all results that arrive while it is busy.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["Mailbox"]

Item = TypeVar("Item")

DELIVERED_A_TURN: Final = 256
"""Maximum results delivered before the loop gets to other work. When a session dies, all its jobs
are answered at once."""


class Mailbox(Generic[Item]):
    """Any thread may `post`, from `start` on; `deliver` receives the batches on `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._deliver: Callable[[list[Item]], None]
        self._lock = threading.Lock()  # protects the two below
        self._waiting: list[Item] = []
        self._closed = False

    def start(self, deliver: Callable[[list[Item]], None]) -> None:
        """Begin to deliver posted items."""
        self._deliver = deliver

    def post(self, *items: Item) -> None:
        """Queue items for delivery; after `close` they are dropped, since nobody takes them."""
        with self._lock:
            if self._closed:
                return
            is_scheduled = bool(self._waiting)
            self._waiting.extend(items)
            if not is_scheduled:
                self._loop.call_soon_threadsafe(self._deliver_some)

    def close(self) -> None:
        """Deliver waiting items and accept no more. Called on the loop; may be called twice."""
        with self._lock:
            self._closed = True
        while self._waiting:
            self._deliver_some()

    def _deliver_some(self) -> None:
        """Deliver the first waiting items; deliver the rest after the loop's other events."""
        with self._lock:
            batch, self._waiting = self._waiting, []
            if len(batch) > DELIVERED_A_TURN:
                self._waiting = batch[DELIVERED_A_TURN:]
                del batch[DELIVERED_A_TURN:]
                self._loop.call_soon(self._deliver_some)
        if batch:
            self._deliver(batch)
