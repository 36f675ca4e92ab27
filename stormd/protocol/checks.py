"""The checks that every message makes of its fields.

What stays true: a check returns, and changes nothing, or raises ProtocolError with the field's
name, its value and what it must be. No check costs more than the value is long.
"""

from __future__ import annotations

from stormd.protocol.errors import ProtocolError
from stormd.protocol.limits import (
    MAX_BATCH,
    MAX_DIMENSIONS,
    MAX_DTYPE,
    MAX_ENTRY_BYTES,
    MAX_HANDLE_BYTES,
    MAX_ID,
    MAX_NAME,
    MAX_TEXT,
)

__all__ = [
    "check_blob",
    "check_dtype",
    "check_flag",
    "check_id",
    "check_ids",
    "check_map",
    "check_name",
    "check_one_of",
    "check_seconds",
    "check_shape",
    "check_size",
    "check_span",
    "check_text",
    "check_texts",
]

# `type(x) is int` and not isinstance: True is an int to isinstance, and no id.


def check_id(name: str, value: object) -> None:
    """Check an id, offset, size or number."""
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise ProtocolError(f"{name} is {_shown(value)}, not an integer in 0 .. 2^63-1")


def check_size(name: str, value: object) -> None:
    """Check the bytes of an entry."""
    if type(value) is not int or not 0 < value <= MAX_ENTRY_BYTES:
        raise ProtocolError(f"{name} is {_shown(value)}, not in 1 .. {MAX_ENTRY_BYTES} bytes")


def check_ids(name: str, value: object) -> None:
    """Check a list of ids."""
    if type(value) is not list or len(value) > MAX_BATCH:
        raise ProtocolError(f"{name} is {_shown(value)}, not a list of at most {MAX_BATCH} ids")
    for item in value:
        check_id(name, item)


def check_seconds(name: str, value: object) -> None:
    """Check a time that is above 0."""
    if type(value) is not float or not 0.0 < value < 1e9:
        raise ProtocolError(f"{name} is {_shown(value)}, not a positive number of seconds")


def check_span(name: str, value: object) -> None:
    """Check a time that may be 0, for none."""
    if type(value) is not float or not 0.0 <= value < 1e9:
        raise ProtocolError(f"{name} is {_shown(value)}, not a number of seconds, 0 or more")


def check_text(name: str, value: object, limit: int = MAX_TEXT) -> None:
    """Check a text of at most `limit` characters."""
    if type(value) is not str or len(value) > limit:
        raise ProtocolError(f"{name} is {_shown(value)}, not text of at most {limit} characters")


def check_texts(name: str, value: object) -> None:
    """Check a list of a few texts."""
    if type(value) is not list or len(value) > 64:
        raise ProtocolError(f"{name} is {_shown(value)}, not a list of at most 64 texts")
    for item in value:
        check_text(name, item)


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Check a text that is one of a few."""
    if type(value) is not str or value not in allowed:
        raise ProtocolError(f"{name} is {_shown(value)}, not one of {', '.join(allowed)}")


def check_blob(name: str, value: object) -> None:
    """Check a binary field."""
    if type(value) is not bytes or len(value) > MAX_HANDLE_BYTES:
        raise ProtocolError(f"{name} is {_shown(value)}, not at most {MAX_HANDLE_BYTES} bytes")


def check_flag(name: str, value: object) -> None:
    """Check a truth value."""
    if type(value) is not bool:
        raise ProtocolError(f"{name} is {_shown(value)}, neither true nor false")


def check_map(name: str, value: object) -> None:
    """Check a map; what is in it is not looked at."""
    if type(value) is not dict:
        raise ProtocolError(f"{name} is {type(value).__name__}, not a map")


def check_shape(name: str, value: object) -> None:
    """Check a tensor's sizes."""
    if type(value) is not list or len(value) > MAX_DIMENSIONS:
        raise ProtocolError(
            f"{name} is {_shown(value)}, not a list of at most {MAX_DIMENSIONS} sizes"
        )
    for item in value:
        check_id(name, item)


def check_dtype(name: str, value: object) -> None:
    """Check the name of a cached tensor's element type."""
    check_text(name, value, MAX_DTYPE)


def check_name(name: str, value: object) -> None:
    """Check the name of a tensor in the shared cache."""
    if type(value) is not str or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise ProtocolError(f"{name} is {_shown(value)}, not 1 to {MAX_NAME} printable characters")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
