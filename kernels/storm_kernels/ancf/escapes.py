"""Measures how often a blob's elements are escapes, without decoding the blob."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import layout
from .header import read_header
from .reference import directory, tile_parts
from .tiles import TileCoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["escape_rate"]

_TILES = 32  # tiles to inspect, evenly spaced: enough to see a drift, cheap for any size


def escape_rate(blob: NDArray[np.uint8]) -> float:
    """Return the share of coded elements that no dictionary entry matched, 0..1.

    Inspects at most 32 tiles. Returns 0 for modes without a dictionary. Raises CorruptBlob.
    """
    header = read_header(blob)
    place = header.geometry
    if not header.plan.k1 or not place.tiles:
        return 0.0
    coder = TileCoder(header.plan, header.dtype)
    bounds = directory(header, blob)
    coded = escaped = 0
    for tile in np.unique(np.linspace(0, place.tiles - 1, _TILES).astype(np.int64)):
        parts = tile_parts(place, blob, bounds, int(tile))
        kept, missed = coder.count(*parts, min(layout.TILE, place.tile_elements(int(tile))))
        coded, escaped = coded + kept, escaped + missed
    return escaped / coded if coded else 0.0
