"""A budget: how much of a training step's saved tensors may be kept on the device.

`stormd run --budget`, STORMD_BUDGET and `storm_client.offload(budget=)` accept the same values: all
three are parsed here.
"""

from __future__ import annotations

import math
from typing import Final, Literal, cast

from stormd.protocol.limits import MAX_ID
from stormd.protocol.sizes import format_size, parse_size

__all__ = ["BUDGET_VARIABLE", "Budget", "budget_text", "parse_budget"]

BUDGET_VARIABLE: Final = "STORMD_BUDGET"
"""The environment variable that sets the budget of every `offload` without a `budget` argument."""

Budget = Literal["least", "fit"] | int | float
"""A word, a number of bytes (int), or a fraction of a step's saved bytes, 0.0 to 1.0 (float)."""

_WORDS: Final = ("least", "fit")
_WANTED: Final = (
    "write least, fit, a size in KiB, MiB or GiB, as in 12GiB, or a fraction from 0.0 to 1.0"
)


def parse_budget(value: str | float) -> Budget:
    """Return the budget that a text or a number means.

    A text with a point and no unit is a fraction, as "0.5"; a whole number is bytes, as "4096".

    Raises:
        ValueError: the value is no budget; the message names the value and the accepted forms.
    """
    if isinstance(value, str):
        return _read(value.strip(), value)
    if type(value) is int and value >= 0:
        return value
    if type(value) is float:
        return _fraction(value, value)
    raise ValueError(f"budget is {value!r}: {_WANTED}")


def budget_text(budget: Budget) -> str:
    """Return a budget as text for people: rounded, and at most MAX_BUDGET characters."""
    if isinstance(budget, str):
        return budget
    if isinstance(budget, float):
        return f"{budget:.4g}" if budget % 1 else f"{budget:.1f}"
    return format_size(min(budget, MAX_ID))


def _read(text: str, given: str) -> Budget:
    if text in _WORDS:
        return cast("Budget", text)
    try:
        if text[-1:].isalpha() or text.isdecimal():
            return parse_size(text)
        number = float(text)
    except ValueError as error:
        raise ValueError(f"budget is {given!r}: {_WANTED}") from error
    return _fraction(number, given)


def _fraction(number: float, given: str | float) -> float:
    if math.isnan(number) or not 0.0 <= number <= 1.0:
        raise ValueError(f"budget is {given!r}: {_WANTED}")
    return number
