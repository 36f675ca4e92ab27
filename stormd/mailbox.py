"""Carries results from worker threads to the event loop, in batches.

What stays true: everything handed over before `close` is delivered on the loop, once and in order,
and the loop is woken once for however many results arrive while it is busy.

Waking the loop, and the client with a frame of its own, costs more than what is in most results.
So one that nobody waits for is left here for the loop to find when it has woken for another
reason, which in a training step is the next store; after LINGER_SECONDS it comes by in any case.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["LINGER_SECONDS", "Mailbox"]

Item = TypeVar("Item")

LINGER_SECONDS: Final = 0.001
"""How long what was left may lie here at most."""


class Mailbox(Generic[Item]):
    """`post` and `leave` from any thread; `deliver` gets the batch on `loop`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[Item]], None]
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._lock = threading.Lock()  # protects the four below
        self._waiting: list[Item] = []
        self._is_woken = False
        self._visit: asyncio.TimerHandle | None = None
        self._closed = False

    # --- from any thread --------------------------------------------------------------------

    def post(self, item: Item) -> None:
        """Hand an item over. Dropped after `close`: then nobody is left to take it."""
        with self._lock:
            self._add(item)
            self._wake()

    def leave(self, item: Item) -> None:
        """Hand an item over that may wait for the loop to come by."""
        with self._lock:
            self._add(item)
            if self._visit is None:
                self._wake()

    # --- on the loop ------------------------------------------------------------------------

    def come_by(self) -> None:
        """Deliver what is there, and once more after LINGER_SECONDS."""
        self._empty()
        with self._lock:
            if self._visit is None and not self._closed:
                self._visit = self._loop.call_later(LINGER_SECONDS, self._end_visit)

    def close(self) -> None:
        """Deliver what is waiting and take nothing more. Twice is fine."""
        self._empty()
        with self._lock:
            self._closed = True
            visit, self._visit = self._visit, None
        if visit is not None:
            visit.cancel()

    # --- helpers ----------------------------------------------------------------------------

    def _add(self, item: Item) -> None:
        if not self._closed:
            self._waiting.append(item)

    def _wake(self) -> None:
        if self._waiting and not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._be_woken)

    def _be_woken(self) -> None:
        with self._lock:
            self._is_woken = False
        self._empty()

    def _end_visit(self) -> None:
        with self._lock:
            self._visit = None
        self._empty()

    def _empty(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting, []
        if batch:
            self._deliver(batch)
