"""`sum` of a captured step's numbers, with the bits that Python's own has for floats.

From Python 3.12 on, `sum` carries the rounding errors of floats along, and adds them at the end. It
does so for floats alone: a number of a step is none, so `sum` would add its value up plainly.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from storm_client.step.scalars import number_of, recorded

__all__ = ["sum_of", "summing"]

_PYTHONS: Final = builtins.sum


@contextmanager
def summing() -> Iterator[None]:
    """Let `sum` record what it does with a step's numbers, in one capture at a time."""
    if sys.version_info >= (3, 12):
        builtins.sum = _sum
    try:
        yield
    finally:
        builtins.sum = _PYTHONS


def _sum(iterable: Iterable[Any], /, start: Any = 0) -> Any:
    items = list(iterable)
    if all(number_of(one) is None for one in (start, *items)):
        return _PYTHONS(items, start)
    return sum_of(items, start)


def sum_of(items: Iterable[Any], start: Any) -> Any:
    """Add floats, and numbers of a step, to `start`, as Python's `sum` does from 3.12 on."""
    total, rest = start, iter(items)
    if type(total) is int:
        for item in rest:
            total = total + item
            if type(item) not in (int, bool):
                break
    if _is_float(total):
        error: Any = 0.0
        for item in rest:
            if _is_float(item):
                error = recorded(_more, error, total, item)
                total = total + item
            elif isinstance(item, int):
                total = total + float(item)
            else:
                total = recorded(_corrected, total, error) + item
                break
        else:
            return recorded(_corrected, total, error)
    for item in rest:
        total = total + item
    return total


def _is_float(value: object) -> bool:
    return type(value) is float or number_of(value) is not None


def _more(error: float, total: float, item: float) -> float:
    """Return the rounding errors so far, with that of `total + item` (Neumaier's sum)."""
    large, small = (total, item) if abs(total) >= abs(item) else (item, total)
    return error + ((large - (total + item)) + small)


def _corrected(total: float, error: float) -> float:
    return total + error if error and math.isfinite(error) else total
