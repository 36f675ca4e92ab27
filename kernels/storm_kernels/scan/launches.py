"""Which tiles a scan on a GPU is cut into: a small table, no measuring at first use.

Tiles, and with them the order in which numbers are combined, follow from the shape, the strides and
the type alone, not from the GPU or what runs beside, so that results repeat. DESIGN.md says what
the figures were measured with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

__all__ = ["Columns", "Rows", "columns_for", "cut", "is_fan", "levels", "rows_for", "vector_for"]

_WARP: Final = 32
_VECTOR_BYTES: Final = 16
"""What a thread loads at once."""

_LEAST_BYTES: Final = 4
"""Smaller loads cannot be asked for ahead."""

_ENOUGH_PROGRAMS: Final = 128
"""So many programs that scan whole sequences, loading ahead, keep a GPU's memory busy."""

_LONG: Final = 1 << 14
"""Beyond it a sum has fewer, longer tiles: what they wait for each other is what it waits for."""


@dataclass(frozen=True)
class Columns:
    """A tile of `stretches` times `rows` rows of `channels` channels.

    With `look_back` each program scans one tile, and `fan` tiles are a group of those that are
    combined at once; otherwise a program scans all tiles of a sequence, in turn.
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
        """How many elements of a sequence a tile has."""
        return self.rows * self.stretches


@dataclass(frozen=True)
class Rows:
    """A tile of `elements` neighbours of one sequence; `look_back` as for columns."""

    elements: int
    warps: int
    look_back: bool
    fan: int = 128

    def __post_init__(self) -> None:
        assert not self.look_back or is_fan(self.fan, 1, self.warps)

    @property
    def length(self) -> int:
        """How many elements of a sequence a tile has."""
        return self.elements


def is_fan(fan: int, channels: int, warps: int) -> bool:
    """Tell whether tiles of `channels` may look back to groups of `fan`.

    Each thread must have a published word of its own: two that look at the same one may find it
    there and not there, and Triton takes what replicas hold for equal.
    """
    return fan > 1 and fan * channels >= _WARP * warps


def levels(tiles: int, fan: int) -> int:
    """Return how many digits the numbers of so many tiles have to base `fan`."""
    count = 1
    while fan**count < tiles:
        count += 1
    return count


def cut(length: int, tile: int) -> int:
    """Return how many tiles of length `tile` a sequence is cut into."""
    return -(-length // tile)


@lru_cache(maxsize=1024)
def columns_for(outer: int, length: int, inner: int, itemsize: int, *, words: int) -> Columns:
    """Return the tile for channels that lie side by side; `words` are a map's 32-bit parts."""
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
    # no more than enough need many tiles each to load ahead
    enough = programs >= (wanted if tiles > 8 else 2 * _ENOUGH_PROGRAMS)
    if enough or tiles <= (4 if words > 1 else 2):
        while rows > 1 and rows * stretches // 2 >= length:
            rows //= 2
        while stretches > 1 and rows * stretches // 2 >= length:
            stretches //= 2
        return Columns(rows, stretches, channels, warps, look_back=False)
    channels = min(widest, 4 * vector if words > 2 else 8 * vector)
    if itemsize > 2 and (words == 2 or (words == 1 and length > _LONG)):
        rows *= 2  # registers hold them: those of complex numbers, or of wider loads, do not
    stretches = _stretches(channels, vector, warps)
    least = max(2, _WARP * warps // channels)
    fan = max(4, (4 if words == 1 else 1) * _WARP * warps // channels)
    fan = max(least, min(fan, _power_of_two(cut(length, rows * stretches))))
    return Columns(rows, stretches, channels, warps, look_back=True, fan=fan)


@lru_cache(maxsize=1024)
def rows_for(outer: int, length: int, *, words: int, gradient: bool = False) -> Rows:
    """Return the tile for sequences whose elements lie side by side."""
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
    """Return how many neighbours a thread loads and stores at once, of numbers of these sizes."""
    vector = max(_VECTOR_BYTES // max(itemsizes), _LEAST_BYTES // min(itemsizes))
    return min(tile.elements, vector)


def _stretches(channels: int, vector: int, warps: int) -> int:
    """Return how many threads a channel has: each scans a stretch of its own."""
    return warps * _WARP // max(1, channels // vector)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
