"""Carries results from worker threads to the event loop, in batches.

Everything posted before `close` is delivered on the loop, once and in order, and the loop is woken
once for however many results arrive while it is busy.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["Mailbox"]

Item = TypeVar("Item")

DELIVERED_A_TURN: Final = 256
"""Results handed on before the loop gets to other work: the jobs of a session that has died are
answered all at once."""


class Mailbox(Generic[Item]):
    """`post` from any thread, from `start` on; `deliver` gets the batch on `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._deliver: Callable[[list[Item]], None]
        self._lock = threading.Lock()  # protects the two below
        self._waiting: list[Item] = []
        self._closed = False

    def start(self, deliver: Callable[[list[Item]], None]) -> None:
        """Have what is posted delivered."""
        self._deliver = deliver

    def post(self, *items: Item) -> None:
        """Hand items over. Dropped after `close`: then nobody is left to take them."""
        with self._lock:
            if self._closed:
                return
            is_awaited = bool(self._waiting)
            self._waiting.extend(items)
            if not is_awaited:
                self._loop.call_soon_threadsafe(self._empty)

    def close(self) -> None:
        """Deliver what is waiting and take nothing more. Called on the loop. Twice is fine."""
        with self._lock:
            self._closed = True
        while self._waiting:
            self._empty()

    def _empty(self) -> None:
        """Deliver what is waiting, or the first of it, and look again after others had a turn."""
        with self._lock:
            batch, self._waiting = self._waiting, []
            if len(batch) > DELIVERED_A_TURN:
                self._waiting = batch[DELIVERED_A_TURN:]
                del batch[DELIVERED_A_TURN:]
                self._loop.call_soon(self._empty)
        if batch:
            self._deliver(batch)
