"""How commands print: one JSON object for programs, plain lines for people.

Results go to standard output, everything else to standard error, so that `--json` output can be
piped as it is. A pipe that nobody reads accepts nothing once it is full, and a process that writes
its errors there must still be able to end: they are written within a time limit.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
import time
from contextlib import suppress
from os import write
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NO_DAEMON",
    "EXIT_OK",
    "EXIT_RESTART",
    "EXIT_USAGE",
    "open_closed_streams",
    "plain_console",
    "print_to_stderr",
    "write_json",
    "write_line",
]

EXIT_OK = 0
EXIT_FAILED = 1
"""A check failed, or the daemon could not do its work."""
EXIT_USAGE = 2
"""Flags, environment or config file cannot be used; argparse's own status."""
EXIT_NO_DAEMON = 3
EXIT_RESTART = 75
"""The daemon ended for another daemon to continue with its state."""
EXIT_INTERRUPTED = 130
"""What a shell reports for a command ended by SIGINT."""

SAY_SECONDS: Final = 2.0


def open_closed_streams() -> None:
    """Open the null device in place of each standard stream that was closed at the start.

    Otherwise a file opened later would get its descriptor, and whatever is written to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode)  # noqa: SIM115 - for as long as the process lives
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def write_json(value: Any) -> None:
    """Print the value as indented JSON."""
    write_line(json.dumps(value, indent=2))


def write_line(text: str = "") -> None:
    """Print one line."""
    sys.stdout.write(text + "\n")


def plain_console() -> Console:
    """Return a console that prints all text as it is: it may be a client's, or a command."""
    from rich.console import Console

    return Console(markup=False, emoji=False)


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
