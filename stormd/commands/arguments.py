"""Command-line values that several commands take.

What stays true: a bad value ends in argparse's usage error, exit status 2, naming the value.
"""

from __future__ import annotations

import argparse

from stormd.query import DEFAULT_TIMEOUT

__all__ = ["add_daemon_arguments", "positive_float", "positive_int"]


def positive_int(text: str) -> int:
    """Return a whole number above 0."""
    number = int(text) if text.isdecimal() else 0
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def positive_float(text: str) -> float:
    """Return a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command that asks a running daemon takes."""
    parser.add_argument(
        "--address",
        metavar="ipc:///PATH",
        help="the daemon's socket (default: STORMD_ADDRESS, the system's, then the user's)",
    )
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="how long to wait for an answer (default: %(default)s)",
    )
