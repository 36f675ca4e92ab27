"""Command-line values that several commands take.

A bad value ends in a usage error, exit status 2, naming the value.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stormd.errors import ConfigError
from stormd.protocol import parse_budget
from stormd.query import DEFAULT_TIMEOUT

__all__ = [
    "add_daemon_arguments",
    "check_picture",
    "positive_int",
    "positive_seconds",
    "valid_budget",
]

_PICTURES: Final = (".png", ".svg", ".pdf")

_MAX_SECONDS: Final = 86400.0


def positive_int(text: str) -> int:
    """Return a whole number above 0."""
    number = int(text) if text.isdecimal() else 0
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def positive_seconds(text: str) -> float:
    """Return a number of seconds above 0, at most a day."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number above 0 and of at most {_MAX_SECONDS:.0f} seconds"
        )
    return number


def valid_budget(text: str) -> str:
    """Return the text of a valid budget unchanged."""
    try:
        parse_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def check_picture(image: str | None, option: str = "--image") -> None:
    """Check that a picture can be written, before its figures are measured.

    Raises:
        ConfigError: matplotlib or the folder is missing, or the suffix is not a known format.
    """
    if image is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib: pip install matplotlib")
    path = Path(image)
    if path.suffix not in _PICTURES:
        raise ConfigError(f"{option} {image!r} must end in one of {', '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {image!r}: create the folder {str(path.parent)!r} first")


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every command that queries a running daemon."""
    parser.add_argument(
        "--address",
        metavar="ipc:///PATH",
        help="the daemon's socket (default: STORMD_ADDRESS, the system's, then the user's)",
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="how long to wait for an answer (default: %(default)s)",
    )
