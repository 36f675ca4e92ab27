"""A word to the user on standard error, for which nobody waits long.

A pipe that nobody reads takes nothing once it is full, and whoever has something to say there must
still come to its end.
"""

from __future__ import annotations

import io
import select
import sys
import time
from contextlib import suppress
from os import write
from typing import Final

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
    data, deadline = line.encode(errors="backslashreplace"), time.monotonic() + seconds
    with suppress(OSError):  # nobody reads any more
        while data:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([], [descriptor], [], left)[1]:
                return
            data = data[write(descriptor, data[: select.PIPE_BUF]) :]  # which a pipe has room for
