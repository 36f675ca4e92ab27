"""Sizes as texts for people, in the units in which they may be set."""

from __future__ import annotations

__all__ = ["format_size"]

_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def format_size(nbytes: float) -> str:
    """Return the size in the largest unit that keeps it at 1 or more: `4.0 GiB`, `17 B`."""
    for unit, size in _UNITS.items():
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
