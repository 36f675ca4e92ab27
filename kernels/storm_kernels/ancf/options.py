"""Checks the arguments of encoders.

All backends check their arguments here, so they reject the same arguments with the same messages.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

from ..errors import UsageError
from .layout import Mode
from .plan import max_encoded_bytes

if TYPE_CHECKING:
    from .dtypes import DType

__all__ = ["POLICIES", "SPEEDS", "check_request", "check_threads", "check_tolerance", "parse_mode"]

SPEEDS = ("fast", "dense")
POLICIES = ("conservative", "adaptive", "aggressive")  # how mode values sizes its dictionary
_MODES = {member.name.lower(): member for member in Mode}


def check_request(nbytes: int, dtype: DType, dst_bytes: int) -> None:
    """Raise UsageError unless `nbytes` are whole elements and their blob fits in `dst_bytes`."""
    if nbytes < 0 or nbytes % dtype.element_bytes:
        raise UsageError(
            f"{nbytes} bytes are no whole number of {dtype.name.lower()} elements of "
            f"{dtype.element_bytes} bytes"
        )
    if dst_bytes < (needed := max_encoded_bytes(nbytes, dtype)):
        raise UsageError(f"output of {dst_bytes} bytes, max_encoded_bytes says {needed}")


def check_threads(threads: int) -> None:
    """Raise UsageError if `threads` is less than 1."""
    if threads < 1:
        raise UsageError(f"threads={threads}: at least 1 is needed")


def check_tolerance(tolerance: float) -> None:
    """Raise UsageError unless `tolerance` is a finite number, 0 (lossless) or more."""
    if not isinstance(tolerance, Real) or not 0 <= tolerance < math.inf:
        raise UsageError(
            f"tolerance {tolerance!r} must be 0 (lossless) or a finite positive number"
        )


def parse_mode(mode: str, speed: str = "fast", policy: str = "adaptive") -> Mode | None:
    """Return the mode of that name, None for "auto"; raise UsageError for unknown names."""
    _check_name("speed", speed, SPEEDS)
    _check_name("policy", policy, POLICIES)
    if mode == "auto":
        return None
    _check_name("mode", mode, ("auto", *_MODES))
    return _MODES[mode]


def _check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UsageError(f"{what} {name!r} is unknown; choose one of {', '.join(known)}")
