"""The two bit planes: the meaning of a pair of bits, the layout of rows, and the kinds of values.

A value w is the two's complement number of two bits, w = bit0 - 2 * bit1: bit0 is set if w is not
zero, bit1 if w is negative. The pair (0, 1) is invalid and rejected. Value c of a row is bit c % 8
of byte c // 8 in both planes; the rest of the row is zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import numpy as np

from ..errors import CorruptBlob, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "LANE_COLUMNS",
    "ROW_ALIGN",
    "Array",
    "Kind",
    "Product",
    "Shape",
    "aligned_plane",
    "check_threshold",
    "group_count",
    "integer_kind",
    "least_row_bytes",
    "packed_bytes",
    "position",
    "refuse_pair",
    "refuse_value",
    "row_bytes",
    "unpadded",
]

Array: TypeAlias = Any
"""A NumPy array or a torch tensor; a backend gets only one of the two."""

Shape: TypeAlias = tuple[int, ...]

ROW_ALIGN: Final = 8
"""The bytes of a plane's row are a multiple of this: words of 64 columns."""

LANE_COLUMNS: Final = 32
"""A group's columns are a multiple of this; a float product has this many partial sums."""

CACHE_LINE: Final = 64

PACKED_VALUES: Final = 320
PACKED_BLOCK: Final = 64
PACKED_DIGITS: Final = 5


class Kind(IntEnum):
    """The types of values; the numbers are `enum storm_ternary_kind` in ternary.h."""

    INT8 = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    PLANES = 3
    INT32 = 4
    INT64 = 5

    @property
    def is_float(self) -> bool:
        """Whether products of this kind are sums of floats."""
        return self is Kind.FLOAT32 or self is Kind.BFLOAT16


@dataclass(slots=True)
class Product:
    """One call: out[b][r] = sum over c of w[r][c] * x[b][c], scaled if there are scales.

    All arrays are for one backend. `bit0` and `bit1` are (rows, bytes). `x` is (batch, columns), or
    bit0 of planes whose bit1 is `x1`. `scale` is float32 (rows, groups).
    """

    bit0: Array
    bit1: Array
    columns: int
    x: Array
    kind: Kind
    x1: Array | None = None
    scale: Array | None = None
    group: int = 0
    threads: int = 1

    @property
    def rows(self) -> int:
        """The rows of w."""
        return int(self.bit0.shape[0])

    @property
    def batch(self) -> int:
        """The number of x."""
        return int(self.x.shape[0])

    @property
    def out_kind(self) -> Kind:
        """FLOAT32 for floats or with scales, else an integer type that cannot overflow."""
        if self.kind.is_float or self.scale is not None:
            return Kind.FLOAT32
        return integer_kind(self.kind, self.columns)


def integer_kind(kind: Kind, columns: int) -> Kind:
    """Return INT32 if no sum of that many products can overflow it, else INT64."""
    largest = columns * (128 if kind is Kind.INT8 else 1)
    return Kind.INT32 if largest < 1 << 31 else Kind.INT64


def row_bytes(columns: int) -> int:
    """Return the bytes of a row of a plane that `encode` returns."""
    return -(-columns // (8 * ROW_ALIGN)) * ROW_ALIGN


def least_row_bytes(columns: int) -> int:
    """Return the minimum bytes of a row of a plane, without padding."""
    return -(-columns // 8)


def aligned_plane(rows: int, columns: int) -> NDArray[np.uint8]:
    """Return memory for a plane, aligned to a cache line.

    NumPy aligns to 16 bytes; then every load of 64 bytes accesses two lines, and products took 1.5
    times as long.
    """
    nbytes = rows * row_bytes(columns)
    memory = np.empty(nbytes + CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % CACHE_LINE
    return memory[first : first + nbytes].reshape(rows, row_bytes(columns))


def packed_bytes(count: int) -> int:
    """Return the bytes of `count` packed values, five per byte."""
    blocks, rest = divmod(count, PACKED_VALUES)
    return blocks * PACKED_BLOCK + -(-rest // PACKED_DIGITS)


def group_count(columns: int, group: int) -> int:
    """Return the number of scales of a row, at least 1; `group` 0 means the whole row."""
    return max(1, -(-columns // group)) if group else 1


def check_threshold(threshold: float | None) -> float | None:
    """Return the threshold as a float.

    Raises:
        UsageError: the threshold is negative or not finite.
    """
    if threshold is None:
        return None
    value = float(threshold)
    if not (value >= 0 and math.isfinite(value)):
        raise UsageError(f"threshold is {threshold!r}; it must be a finite number >= 0, or None")
    return value


def position(place: int, shape: Shape) -> str:
    """Return the index of value number `place`, as text such as "[1, 2]"."""
    return "[" + ", ".join(str(int(one)) for one in np.unravel_index(place, shape)) + "]"


def refuse_value(place: int, shape: Shape, value: object, threshold: float | None) -> NoReturn:
    """Raise UsageError about the first value that cannot be encoded."""
    advice = "give a threshold to round others" if threshold is None else "NaN has no sign"
    raise UsageError(
        f"values{position(place, shape)} is {value}; a ternary tensor holds -1, 0 and 1: {advice}"
    )


def refuse_pair(place: int | None = None, shape: Shape | None = None) -> NoReturn:
    """Raise CorruptBlob about planes in which bit1 is set without bit0."""
    where = "" if place is None or shape is None else f" at {position(place, shape)}"
    raise CorruptBlob(
        f"the planes hold bit0 = 0 with bit1 = 1{where}, which stands for no value: they are "
        "damaged, swapped or not from encode()"
    )


def unpadded(bits: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    """Return (rows, columns) bits of a plane of (rows, bytes)."""
    return np.unpackbits(bits, axis=-1, count=columns, bitorder="little")
