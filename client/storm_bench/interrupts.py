"""Ctrl-C and SIGTERM for long-running commands: raised at once, and noted.

An interrupt ends the command. Python swallows an exception that a handler raises in a destructor,
also in a library's. So `check` raises a noted interrupt again.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts", "noted_interrupts"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """The signals received so far."""

    def __init__(self) -> None:
        self._noted: list[int] = []

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come, even if its exception was swallowed."""
        if self._noted:
            raise KeyboardInterrupt

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's
        """Note a signal and raise KeyboardInterrupt."""
        self._noted.append(number)
        raise KeyboardInterrupt


@contextmanager
def noted_interrupts() -> Iterator[Interrupts]:
    """Note SIGINT and SIGTERM, even if SIGINT was ignored, as in a shell's background jobs."""
    interrupts = Interrupts()
    before = [(number, signal.signal(number, interrupts.handle)) for number in SIGNALS]
    try:
        yield interrupts
    finally:
        for number, handler in before:
            signal.signal(number, handler)
