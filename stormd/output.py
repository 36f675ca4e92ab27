"""How commands print: one JSON object for programs, plain lines for people.

Results go to standard output, everything else to standard error, so that `--json` output can be
piped as it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = [
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NO_DAEMON",
    "EXIT_OK",
    "EXIT_RESTART",
    "EXIT_USAGE",
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


def write_json(value: Any) -> None:
    """Print the value as indented JSON."""
    write_line(json.dumps(value, indent=2))


def write_line(text: str = "") -> None:
    """Print one line."""
    sys.stdout.write(text + "\n")
