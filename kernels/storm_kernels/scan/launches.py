"""Chooses the tiles of a scan on a GPU from a small table, without tuning at first use.

Tiles determine the order in which numbers are combined. They depend only on the shape, the strides
and the type, not on the GPU or other work, so results are reproducible. DESIGN.md describes the
measurements behind the constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

__all__ = ["Columns", "Rows", "columns_for", "cut", "is_fan", "levels", "rows_for", "vector_for"]

_WARP: Final = 32
_VECTOR_BYTES: Final = 16
"""The bytes of one load of a thread."""

_MIN_BYTES: Final = 4
"""The smallest load that can be pipelined."""

_ENOUGH_PROGRAMS: Final = 128
"""This many programs that scan whole sequences and load ahead saturate a GPU's memory."""

_LONG: Final = 1 << 14
"""Longer sums have fewer, longer tiles: the tiles' waits for each other limit their speed."""


@dataclass(frozen=True)
class Columns:
    """A tile of `stretches` times `rows` rows of `channels` channels.

    With `look_back` each program scans one tile, and groups of `fan` tiles are combined at once.
    Otherwise a program scans all tiles of a sequence, one after another.
    """

    rows: int
    stretches: int
    channels: int
    warps: int
    look_back: bool
    fan: int = 16

    def __post_init__(self) -> None:
        assert not self.look_back or is_fan(self.fan, self.channels, self.warps)

    @property
    def length(self) -> int:
        """The number of elements of a sequence in a tile."""
        return self.rows * self.stretches


@dataclass(frozen=True)
class Rows:
    """A tile of `elements` consecutive elements of one sequence; `look_back` as for columns."""

    elements: int
    warps: int
    look_back: bool
    fan: int = 128

    def __post_init__(self) -> None:
        assert not self.look_back or is_fan(self.fan, 1, self.warps)

    @property
    def length(self) -> int:
        """The number of elements of a sequence in a tile."""
        return self.elements


def is_fan(fan: int, channels: int, warps: int) -> bool:
    """Return whether tiles of `channels` may look back to groups of `fan`.

    Each thread must read its own published word. If two threads read the same word, one may find it
    published and the other not, but Triton assumes that replicas are equal.
    """
    return fan > 1 and fan * channels >= _WARP * warps


def levels(tiles: int, fan: int) -> int:
    """Return the number of base-`fan` digits that number `tiles` tiles."""
    count = 1
    while fan**count < tiles:
        count += 1
    return count


def cut(length: int, tile: int) -> int:
    """Return the number of tiles of length `tile` in a sequence."""
    return -(-length // tile)


@lru_cache(maxsize=1024)
def columns_for(outer: int, length: int, inner: int, itemsize: int, *, words: int) -> Columns:
    """Return the tile for contiguous channels; `words` is the number of 32-bit words of a map."""
    vector = max(1, _VECTOR_BYTES // itemsize)
    widest = min(_power_of_two(inner), vector * _WARP)
    narrowest = min(widest, 4 * vector)
    rows, warps = max(2, 16 // words), 4
    channels = widest
    wanted = _ENOUGH_PROGRAMS << (words > 1)
    while channels > narrowest and outer * cut(inner, channels) < wanted:
        channels //= 2
    stretches = _stretches(channels, vector, warps)
    programs, tiles = outer * cut(inner, channels), cut(length, rows * stretches)
    # if there are just enough programs, each needs many tiles to load ahead
    enough = programs >= (wanted if tiles > 8 else 2 * _ENOUGH_PROGRAMS)
    if enough or tiles <= (4 if words > 1 else 2):
        while rows > 1 and rows * stretches // 2 >= length:
            rows //= 2
        while stretches > 1 and rows * stretches // 2 >= length:
            stretches //= 2
        return Columns(rows, stretches, channels, warps, look_back=False)
    channels = min(widest, 4 * vector if words > 2 else 8 * vector)
    if itemsize > 2 and (words == 2 or (words == 1 and length > _LONG)):
        rows *= 2  # these fit registers; complex numbers or wider loads do not
    stretches = _stretches(channels, vector, warps)
    least = max(2, _WARP * warps // channels)
    fan = max(4, (4 if words == 1 else 1) * _WARP * warps // channels)
    fan = max(least, min(fan, _power_of_two(cut(length, rows * stretches))))
    return Columns(rows, stretches, channels, warps, look_back=True, fan=fan)


@lru_cache(maxsize=1024)
def rows_for(outer: int, length: int, *, words: int, gradient: bool = False) -> Rows:
    """Return the tile for sequences whose elements are contiguous."""
    look_back = outer < _ENOUGH_PROGRAMS and length > 2 * 4096 // words
    if look_back:
        elements, warps = 4096 if words == 1 else 2048, 1
    elif outer >= 8 * _ENOUGH_PROGRAMS:
        elements, warps = (512, 1) if gradient else (2048, 2)
    elif outer < _ENOUGH_PROGRAMS and length > 4096 // words:
        elements, warps = 8192, 8  # the whole sequence
    else:
        elements, warps = 4096, 4
    elements = max(_WARP, min(elements // words, _power_of_two(length)))
    return Rows(elements, warps, look_back=look_back, fan=_WARP * warps)


def vector_for(tile: Rows, *itemsizes: int) -> int:
    """Return how many consecutive numbers, of these sizes, a thread loads and stores at once."""
    vector = max(_VECTOR_BYTES // max(itemsizes), _MIN_BYTES // min(itemsizes))
    return min(tile.elements, vector)


def _stretches(channels: int, vector: int, warps: int) -> int:
    """Return the number of threads per channel; each scans its own stretch."""
    return warps * _WARP // max(1, channels // vector)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
