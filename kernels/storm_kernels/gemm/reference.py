"""The kernels' results computed by NumPy: the reference for the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..ancf import reference
from .window import Window, header, window_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..ancf.dtypes import DType

__all__ = ["encode", "exponent_counts", "window"]


def exponent_counts(bits: NDArray[np.uint16], dtype: DType) -> list[int]:
    """Return the number of elements with each exponent; `bits` are the elements' bits."""
    mantissa = dtype.mantissa_bits
    symbols = bits.ravel() >> mantissa & ((1 << (15 - mantissa)) - 1)
    return [int(count) for count in np.bincount(symbols, minlength=1 << (15 - mantissa))]


def window(bits: NDArray[np.uint16], dtype: DType) -> Window:
    """Return the best window for all elements."""
    return window_of(exponent_counts(bits, dtype), dtype)


def encode(bits: NDArray[np.uint16], dtype: DType, base: int) -> NDArray[np.uint8]:
    """Return the blob whose window begins at `base`; a raw blob if that is smaller."""
    elements = bits.ravel()
    return reference.encode_planned(header(dtype, elements.size, base), elements)
