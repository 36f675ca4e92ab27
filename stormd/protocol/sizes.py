"""Sizes as people write them: converts `4GiB` to bytes and back.

Daemon and client both parse and format sizes with this module. Parsing accepts only binary units
and returns only whole numbers of bytes, so a size means the same to every reader. `4GB` is an error
rather than a guess.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["exact_size", "format_apart", "format_size", "parse_size", "suggested_pool"]

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the number of bytes in `4GiB`, `512 MiB`, `1.5GiB` or plain `4096`.

    Raises:
        ValueError: the text is no size, has an unknown unit, or is not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number and KiB, MiB or GiB, as in 4GiB")
    number, unit = match.groups()
    if unit not in _UNITS:
        meant = next((known for known in _UNITS if known[:1] == unit[:1].upper()), "")
        near = f", as in {number}{meant}" if meant else ""
        raise ValueError(f"{text!r} has the unit {unit!r}: use one of KiB, MiB, GiB, TiB{near}")
    whole, _, fraction = number.partition(".")
    size, rest = divmod(int(whole + fraction) * _UNITS[unit], int("1" + "0" * len(fraction)))
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes: use a smaller unit")
    return size


def exact_size(nbytes: int) -> str:
    """Return the size in the largest unit that divides it, such as `4GiB`; parse_size reads it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return f"{nbytes}B"


def format_size(nbytes: float) -> str:
    """Return the size in the largest unit in which it is at least 1: `4.0 GiB`, `17 B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.1f} {unit}"
    return f"{nbytes:.0f} B"


def suggested_pool(nbytes: int) -> int:
    """Return a round pool size that holds `nbytes` with a quarter to spare."""
    unit = _UNITS["GiB"] if nbytes >= _UNITS["GiB"] else 64 * _UNITS["MiB"]
    return max(1, -(-nbytes * 5 // (4 * unit))) * unit


def format_apart(less: int, more: int) -> tuple[str, str]:
    """Return two sizes as text that differs: in bytes where rounding would make them look alike."""
    texts = format_size(less), format_size(more)
    return texts if texts[0] != texts[1] else (f"{less} bytes", f"{more} bytes")
