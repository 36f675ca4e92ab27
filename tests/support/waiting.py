"""Waiting on a condition with a deadline: how tests synchronise with other threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

POLL_SECONDS = 0.005


def wait_until(
    condition: Callable[[], bool],
    seconds: float = 60.0,
    found: Callable[[], Any] = lambda: "it does not",
) -> None:
    """Wait until the condition holds; fail with what `found` returns where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds} s: {found()}")
        time.sleep(POLL_SECONDS)
