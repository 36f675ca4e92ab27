"""Lets Feeders' iterables rest while a step is captured.

A capture compares the states of NumPy's generators, and any thread may draw from those. Both sides
wait for a while only, so that none waits for ever for what the other needs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final

__all__ = ["capturing", "holding", "iterating", "waiting"]

WAIT_SECONDS: Final = 5.0
"""The longest wait: of a capture for an item that is being made, and of the next item for it."""

POLL_SECONDS: Final = 0.002

_captures: set[object] = set()
_items: dict[object, int] = {}
"""The threads that make items. An interrupt takes an entry out of both, wherever it strikes."""


@contextmanager
def capturing() -> Iterator[None]:
    """Begin once no other thread makes an item of a Feeder; none begins another one meanwhile."""
    own, thread = object(), threading.get_ident()
    try:
        _captures.add(own)
        _wait_while(lambda: any(one != thread for one in list(_items.values())))
        yield
    finally:
        _captures.discard(own)


@contextmanager
def iterating() -> Iterator[None]:
    """Begin once no step is captured."""
    own, thread = object(), threading.get_ident()
    try:
        _items[own] = thread  # before captures are looked for, as they look for items
        if _captures:
            del _items[own]
            _wait_while(lambda: bool(_captures))
            _items[own] = thread
        yield
    finally:
        _items.pop(own, None)


@contextmanager
def waiting() -> Iterator[None]:
    """Let others capture while this thread, within its own item, waits for that of another."""
    thread = threading.get_ident()
    own = [one for one, of in list(_items.items()) if of == thread]
    try:
        for one in own:
            del _items[one]
        yield
    finally:
        _items.update(dict.fromkeys(own, thread))


@contextmanager
def holding(lock: AbstractContextManager[object]) -> Iterator[None]:
    """Hold a lock; while this thread waits for it within its own item, others may capture."""
    with ExitStack() as stack:
        with waiting():
            stack.enter_context(lock)
        yield


def _wait_while(is_running: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while is_running() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
