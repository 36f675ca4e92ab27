"""ANCF's checksum of original bytes, in NumPy (FORMAT.md, section 8).

The checksum is a sum over independent columns, so every backend may add them in any order. A change
of any single word certainly changes the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from . import layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["checksum", "from_sums", "header_check"]

_MASK = (1 << 64) - 1
_COLUMNS = 32  # per chunk
_BATCH_CHUNKS = 2048  # 4 MiB at a time, so that temporaries stay small


def checksum(data: NDArray[np.uint8]) -> int:
    """Return the 64-bit checksum of `data` (1-D uint8, contiguous, any length)."""
    total = data.size * layout.CHECK_LENGTH
    step = _BATCH_CHUNKS * layout.CHECK_CHUNK_BYTES
    for start in range(0, data.size, step):
        first_column = start // layout.CHECK_CHUNK_BYTES * _COLUMNS
        total += _columns_sum(data[start : start + step], first_column)
    return total & _MASK


def from_sums(sums: Iterable[int], nbytes: int) -> int:
    """Return the checksum of `nbytes` bytes from partial sums of its columns."""
    return (sum(sums) + nbytes * layout.CHECK_LENGTH) & _MASK


def header_check(head: bytes) -> int:
    """Return the check of a header's first 248 bytes."""
    value = 0
    for word in np.frombuffer(head, "<u8"):
        value = ((value ^ int(word)) * layout.CHECK_MIX) & _MASK
        value ^= value >> 29
    return value


def _columns_sum(data: NDArray[np.uint8], first_column: int) -> int:
    chunks = -(-data.size // layout.CHECK_CHUNK_BYTES)
    padded = np.zeros(chunks * layout.CHECK_CHUNK_BYTES, np.uint8)
    padded[: data.size] = data
    words = padded.view("<u4").astype(np.uint64).reshape(chunks, 4, _COLUMNS, 4)
    keys = np.array(layout.CHECK_KEYS, np.uint64).reshape(4, 1, 4)
    sums = (words * keys).sum(axis=(1, 3), dtype=np.uint64).reshape(-1)
    index = np.arange(first_column, first_column + sums.size, dtype=np.uint64)
    mixed = sums ^ (index * np.uint64(layout.CHECK_INDEX))
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(layout.CHECK_MIX)
    mixed ^= mixed >> np.uint64(29)
    return int(mixed.sum(dtype=np.uint64))
