"""A word to the user on standard error, for which nobody waits long.

A pipe that nobody reads takes nothing once it is full, and whoever has something to say there must
still come to its end.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

__all__ = ["say"]

SAY_SECONDS: Final = 2.0


def say(text: str, seconds: float = SAY_SECONDS) -> None:
    """Write `stormd: text` to standard error; what is not taken within `seconds` is lost.

    Past Python's buffer, which would be written again, and waited for, at the process's end.
    """
    line = f"stormd: {text}\n"
    try:
        descriptor = sys.stderr.fileno()
    except io.UnsupportedOperation:  # something else stands in its place
        sys.stderr.write(line)
        return
    data = line.encode(errors="backslashreplace")
    with suppress(OSError), _alarm(seconds):  # nobody reads any more, or not in time
        while data:
            data = data[os.write(descriptor, data) :]


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so long; in others nothing can be done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _give_up(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - what a handler is given
    raise TimeoutError
