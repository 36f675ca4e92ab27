"""Lets Feeders' iterables rest while a step is captured.

A capture compares the states of NumPy's generators, and any thread may draw from those. Both sides
wait for a while only, so that none waits for ever for what the other needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["capturing", "iterating"]

WAIT_SECONDS: Final = 20.0
"""The longest wait: of a capture for an item that is being made, and of the next item for it."""

POLL_SECONDS: Final = 0.002

_captures: set[object] = set()
_items: set[object] = set()
"""One object for each that runs. An interrupt takes it out, wherever it strikes."""


@contextmanager
def capturing() -> Iterator[None]:
    """Begin once no Feeder makes an item; none begins another one in the block."""
    own = object()
    try:
        _captures.add(own)
        _wait_while(_items)
        yield
    finally:
        _captures.discard(own)


@contextmanager
def iterating() -> Iterator[None]:
    """Begin once no step is captured."""
    own = object()
    try:
        _items.add(own)  # before captures are looked for, as they look for items
        if _captures:
            _items.discard(own)
            _wait_while(_captures)
            _items.add(own)
        yield
    finally:
        _items.discard(own)


def _wait_while(running: set[object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
