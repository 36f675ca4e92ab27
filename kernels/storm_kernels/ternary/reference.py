"""Ternary tensors in NumPy: the simplest implementation, which defines every backend's results.

Integer results are exact. Float results have one order of summation, which `multiply` documents and
all host backends follow bit for bit. Arrays are contiguous; planes are (rows, bytes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import CorruptBlob
from .planes import (
    LANE_COLUMNS,
    PACKED_BLOCK,
    PACKED_DIGITS,
    PACKED_VALUES,
    Kind,
    Product,
    packed_bytes,
    refuse_pair,
    refuse_value,
    row_bytes,
    unpadded,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["decode", "dot", "encode", "multiply", "pack", "unpack"]

SLAB_VALUES: Final = 1 << 22
"""Values of w that are decoded at a time."""

EXACT_IN_FLOAT32: Final = (1 << 24) // 128
"""The maximum number of columns for which sums of products with int8 are exact in float32."""


def encode(
    values: NDArray[Any], kind: Kind, threshold: float | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the planes of (rows, columns) values; bfloat16 values are given as uint16.

    Raises UsageError for the first value that is not -1, 0 or 1 or, with a threshold, NaN.
    """
    wide = _widened(values, kind)
    with np.errstate(invalid="ignore"):
        if threshold is None:
            signs = np.sign(wide)
            refused = ~(wide == signs)
        else:
            limit = np.float32(threshold)
            signs = (wide > limit).astype(np.int8) - (wide < -limit).astype(np.int8)
            refused = np.isnan(wide)
    if refused.any():
        place = int(np.argmax(refused.reshape(-1)))
        refuse_value(place, wide.shape, wide.reshape(-1)[place], threshold)
    return _plane(signs != 0), _plane(signs < 0)


def decode(
    bit0: NDArray[np.uint8], bit1: NDArray[np.uint8], columns: int, kind: Kind
) -> NDArray[Any]:
    """Return (rows, columns) values as int8 or float32; raises CorruptBlob for a pair (0, 1)."""
    one, negative = unpadded(bit0, columns), unpadded(bit1, columns)
    wrong = negative > one
    if wrong.any():
        refuse_pair(int(np.argmax(wrong.reshape(-1))), wrong.shape)
    values = one.astype(np.int8) - 2 * negative.astype(np.int8)
    return values if kind is Kind.INT8 else values.astype(np.float32)


def dot(
    a0: NDArray[np.uint8], a1: NDArray[np.uint8], b0: NDArray[np.uint8], b1: NDArray[np.uint8]
) -> int:
    """Return the sum of a * b over all bits: common ones minus twice those with different signs."""
    if (a1 & ~a0).any() or (b1 & ~b0).any():
        refuse_pair()
    product = a0 & b0
    negative = product & (a1 ^ b1)
    return _ones(product) - 2 * _ones(negative)


def multiply(product: Product) -> NDArray[Any]:
    """Return (batch, rows) results.

    Integers are summed exactly, within each group if there are groups. Floats: within a group, each
    of 32 partial sums starts at +0 and adds the columns that are equal modulo 32, in ascending
    order. A zero of w adds nothing, whatever x is there. Then sum i adds sum i + 16, i + 8, i + 4,
    i + 2 and i + 1. Each group's sum, converted to float32, is multiplied by its scale and added,
    the groups in ascending order. Every operation is rounded to float32.
    """
    out = np.empty((product.batch, product.rows), _DTYPES[product.out_kind])
    rows = max(1, SLAB_VALUES // max(1, product.columns))
    for first in range(0, product.rows, rows):
        part = slice(first, first + rows)
        w = decode(product.bit0[part], product.bit1[part], product.columns, Kind.INT8)
        scale = None if product.scale is None else product.scale[part]
        out[:, part] = _multiplied(product, w, scale)
    return out


def pack(bit0: NDArray[np.uint8], bit1: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Return `count` values of one row, five per byte (DESIGN.md, "Five values a byte")."""
    digits = decode(bit0.reshape(1, -1), bit1.reshape(1, -1), count, Kind.INT8)[0] + 1
    packed = np.empty(packed_bytes(count), np.uint8)
    whole = count // PACKED_VALUES * PACKED_VALUES
    end = whole // PACKED_DIGITS
    blocks = digits[:whole].reshape(-1, PACKED_DIGITS, PACKED_BLOCK)
    packed[:end] = _bytes_of_digits(blocks).reshape(-1)
    rest = np.ones(PACKED_DIGITS * (packed.size - end), np.int8)
    rest[: count - whole] = digits[whole:]
    packed[end:] = _bytes_of_digits(rest.reshape(1, PACKED_DIGITS, -1)).reshape(-1)
    return packed


def unpack(packed: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the planes of `count` values, as one row.

    Raises CorruptBlob for a byte that encodes no five values, or for a value after the last.
    """
    if (packed.astype(np.uint16) * 243 % 256 >= 243).any():
        raise CorruptBlob("a packed byte stands for no five values")
    whole = count // PACKED_VALUES * PACKED_VALUES
    end = whole // PACKED_DIGITS
    digits = np.concatenate(
        [
            _digits_of_bytes(packed[:end].reshape(-1, PACKED_BLOCK)).reshape(-1),
            _digits_of_bytes(packed[end:].reshape(1, -1)).reshape(-1),
        ]
    )
    if (digits[count:] != 1).any():
        raise CorruptBlob("the packed bytes hold values behind the last one")
    values = digits[:count].astype(np.int8) - 1
    return encode(values.reshape(1, -1), Kind.INT8, None)


# --- helpers ------------------------------------------------------------------------------------

_DTYPES: Final = {Kind.FLOAT32: np.float32, Kind.INT32: np.int32, Kind.INT64: np.int64}


def _widened(values: NDArray[Any], kind: Kind) -> NDArray[Any]:
    """Return bfloat16, which NumPy lacks, as float32; other values unchanged."""
    if kind is not Kind.BFLOAT16:
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


def _plane(set_bits: NDArray[np.bool_]) -> NDArray[np.uint8]:
    rows, columns = set_bits.shape
    plane = np.zeros((rows, row_bytes(columns)), np.uint8)
    packed = np.packbits(set_bits, axis=-1, bitorder="little")
    plane[:, : packed.shape[1]] = packed
    return plane


def _ones(bits: NDArray[np.uint8]) -> int:
    counts = np.unpackbits(np.arange(256, dtype=np.uint8).reshape(-1, 1), axis=1).sum(1)
    return int(np.bincount(bits.reshape(-1), minlength=256) @ counts)


def _multiplied(
    product: Product, w: NDArray[np.int8], scale: NDArray[np.float32] | None
) -> NDArray[Any]:
    x = product.x
    if product.x1 is not None:
        x = decode(x, product.x1, product.columns, Kind.INT8)
    x = _widened(x, product.kind)
    step = product.group or max(1, product.columns)
    total = np.zeros((x.shape[0], w.shape[0]), _DTYPES[product.out_kind])
    for number, first in enumerate(range(0, product.columns, step)):
        group = slice(first, first + step)
        add = _float_sums if product.kind.is_float else _integer_sums
        sums = add(w[:, group], x[:, group])
        if scale is not None:
            sums = sums.astype(np.float32) * scale[:, number]
        total += sums.astype(total.dtype)
    return total


def _integer_sums(w: NDArray[np.int8], x: NDArray[np.int8]) -> NDArray[np.int64]:
    """Return exact sums, by a float product in which every intermediate integer is exact."""
    wide: Any = np.float32 if w.shape[1] <= EXACT_IN_FLOAT32 else np.float64
    sums: NDArray[np.int64] = (x.astype(wide) @ w.astype(wide).T).astype(np.int64)
    return sums


def _float_sums(w: NDArray[np.int8], x: NDArray[np.float32]) -> NDArray[np.float32]:
    columns = -(-w.shape[1] // LANE_COLUMNS) * LANE_COLUMNS
    padding = ((0, 0), (0, columns - w.shape[1]))
    chunks = columns // LANE_COLUMNS  # not -1, which NumPy cannot infer for arrays without rows
    signs = np.pad(w, padding).reshape(w.shape[0], chunks, LANE_COLUMNS)
    lanes = np.pad(x, padding).reshape(x.shape[0], chunks, LANE_COLUMNS)
    sums = np.empty((x.shape[0], w.shape[0]), np.float32)
    for b in range(x.shape[0]):
        all_sums = np.zeros((w.shape[0], LANE_COLUMNS), np.float32)
        for chunk in range(signs.shape[1]):
            sign, one = signs[:, chunk], lanes[b, chunk]
            all_sums += np.where(sign == 0, np.float32(0), np.where(sign < 0, -one, one))
        half = LANE_COLUMNS // 2
        while half:
            all_sums[:, :half] += all_sums[:, half : 2 * half]
            half //= 2
        sums[b] = all_sums[:, 0]
    return sums


def _bytes_of_digits(digits: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return one byte per column of five digits (axis 1), the first digit the most significant."""
    number = np.zeros((digits.shape[0], digits.shape[2]), np.int64)
    for i in range(PACKED_DIGITS):
        number = 3 * number + digits[:, i]
    return (-(-256 * number // 243)).astype(np.uint8)


def _digits_of_bytes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return (blocks, five, bytes) digits: the carries of repeated multiplications by three."""
    rest = packed.astype(np.uint16)
    digits = np.empty((packed.shape[0], PACKED_DIGITS, packed.shape[1]), np.uint8)
    for i in range(PACKED_DIGITS):
        rest = rest % 256 * 3
        digits[:, i] = rest // 256
    return digits
