"""Sizes as people write them: `4GiB` to bytes and back.

Daemon and client read and show sizes by this one module. Only exact numbers of bytes come out, and
only binary units go in, so that a size means the same to every reader. `4GB` is an error rather
than a guess.
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
    """Return the bytes of `4GiB`, `512 MiB`, `1.5GiB` or plain `4096`.

    Raises:
        ValueError: no size, an unknown unit, or not a whole number of bytes.
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
    """Return the size in the largest unit that divides it, as parse_size reads it: `4GiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return f"{nbytes}B"


def format_size(nbytes: float) -> str:
    """Return the size in the largest unit that keeps it at 1 or more: `4.0 GiB`, `17 B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.1f} {unit}"
    return f"{nbytes:.0f} B"


def suggested_pool(nbytes: int) -> int:
    """Return a pool that holds so many bytes with a quarter to spare, in a size people write."""
    unit = _UNITS["GiB"] if nbytes >= _UNITS["GiB"] else 64 * _UNITS["MiB"]
    return max(1, -(-nbytes * 5 // (4 * unit))) * unit


def format_apart(less: int, more: int) -> tuple[str, str]:
    """Return two different sizes as people read them, in bytes where they would look alike."""
    texts = format_size(less), format_size(more)
    return texts if texts[0] != texts[1] else (f"{less} bytes", f"{more} bytes")
