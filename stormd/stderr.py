"""Messages to the user on standard error, written within a time limit.

A pipe that nobody reads accepts nothing once it is full, and a process that writes there must still
be able to end.
"""

from __future__ import annotations

import io
import select
import sys
import time
from contextlib import suppress
from os import write
from typing import Final

__all__ = ["print_to_stderr"]

SAY_SECONDS: Final = 2.0


def print_to_stderr(text: str, seconds: float = SAY_SECONDS) -> None:
    """Write `stormd: text` to standard error; what is not accepted within `seconds` is lost.

    Bypasses Python's buffer: Python would write it again, and wait for it, at the process's end.
    """
    line = f"stormd: {text}\n"
    try:
        descriptor = sys.stderr.fileno()
    except io.UnsupportedOperation:  # stderr is replaced by an object without a descriptor
        sys.stderr.write(line)
        return
    data, deadline = line.encode(errors="backslashreplace"), time.monotonic() + seconds
    with suppress(OSError):  # nobody reads any more
        while data:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([], [descriptor], [], left)[1]:
                return
            data = data[write(descriptor, data[: select.PIPE_BUF]) :]  # a ready pipe has room for
