"""Interrupts at moments that chance chooses."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interrupted_after"]


@contextmanager
def interrupted_after(seconds: float, fired: list[int]) -> Iterator[None]:
    """Raise KeyboardInterrupt in what is inside, whatever runs after so much processor time."""

    def interrupt(number: int, frame: object) -> None:
        fired.append(number)
        raise KeyboardInterrupt

    # Hypothesis has the collector call Python code, where an interrupt would be lost.
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        gc.callbacks[:] = callbacks
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
