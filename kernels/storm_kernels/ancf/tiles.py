"""Encodes and decodes one tile in NumPy: planes, bitmaps, codes, escapes (FORMAT.md, 4 to 7).

A `TileCoder` converts a tile to its fixed block and record, and back. Its decoder accepts any
bytes: it raises CorruptBlob if a record is shorter than the tile's bits require.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import CorruptBlob
from . import layout
from .layout import Mode
from .plan import Plan, bitmap_bytes, round_up

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .dtypes import DType

    Bytes = NDArray[np.uint8]
    Elements = NDArray[np.unsignedinteger]

__all__ = ["TileCoder", "pack_planes", "unpack_planes"]

_INTEGER_HEAD_BYTES = 16


def pack_planes(values: Elements, bits: int, padded: int) -> Bytes:
    """Return `planes(values, bits, padded)`: the low `bits` bits of each value, zero-padded."""
    wide = np.zeros(padded, np.uint64)
    wide[: values.size] = values
    parts = [np.empty(0, np.uint8)]
    for low, size in _pieces(bits):
        piece = wide >> np.uint64(low)
        parts.append(_pack_bit_plane(piece) if size == 1 else _pack_words(piece, size))
    return np.concatenate(parts)


def unpack_planes(data: Bytes, bits: int, padded: int, count: int) -> NDArray[np.uint64]:
    """Return the first `count` values of the planes at the start of `data`."""
    values = np.zeros(count, np.uint64)
    at = 0
    for low, size in _pieces(bits):
        end = at + padded * size // 8
        if size == 1:
            piece = np.unpackbits(data[at:end], bitorder="little")
        else:
            piece = np.frombuffer(data[at:end].tobytes(), f"<u{size // 8}")
        values |= piece[:count].astype(np.uint64) << np.uint64(low)
        at = end
    return values


def _pieces(bits: int) -> list[tuple[int, int]]:
    """Return (lowest bit, width) of each piece of a field of `bits` bits."""
    pieces, low = [], 0
    while low < bits:
        size = next(size for size in (32, 16, 8, 1) if size <= bits - low)
        pieces.append((low, size))
        low += size
    return pieces


def _pack_bit_plane(values: NDArray[np.uint64]) -> Bytes:
    return np.packbits((values & np.uint64(1)).astype(np.uint8), bitorder="little")


def _pack_words(values: NDArray[np.uint64], size: int) -> Bytes:
    mask = np.uint64((1 << size) - 1)
    return (values & mask).astype(f"<u{size // 8}").view(np.uint8)


class _Reader:
    """Reads a record from front to back."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, nbytes: int) -> Bytes:
        start, self._at = self._at, self._at + nbytes
        if self._at > self._data.size:
            raise CorruptBlob(f"a record has {self._data.size} bytes, its tile needs {self._at}")
        return self._data[start : self._at]

    def take_planes(self, bits: int, padded: int, count: int) -> NDArray[np.uint64]:
        return unpack_planes(self.take(padded * bits // 8), bits, padded, count)


class TileCoder:
    """Encodes and decodes single tiles of one plan and dtype."""

    def __init__(self, plan: Plan, dtype: DType) -> None:
        self._plan = plan
        self._dtype = dtype
        self._word = np.dtype(f"<u{dtype.element_bytes}")
        self._sign = self._word.type(1 << (dtype.width - 1))
        self._escape = np.dtype(f"<u{plan.escape_bytes(dtype) or 1}")
        self._entries = np.zeros(sum(plan.slots) + 1, np.uint64)
        self._entries[: len(plan.dictionary)] = plan.dictionary
        self._sorted = np.argsort(np.array(plan.dictionary, np.uint64), kind="stable")

    def encode(self, tile: Elements) -> tuple[Bytes, Bytes]:
        """Return the fixed block and the unpadded record of `tile` (1..4096 elements)."""
        if self._plan.mode is Mode.INTEGER:
            return np.empty(0, np.uint8), self._encode_integers(tile)
        if not self._plan.bitmap:
            planes, rest = self._encode_symbols(tile, round_up(tile.size, 128))
            return planes, rest
        signs = np.empty(0, np.uint8)
        if self._plan.keeps_signs_apart:
            signs = _bits(tile >= self._sign, 128)
            tile = tile & ~self._sign
        present = tile != self._plan.fill
        block, head = _encode_bitmap(present, self._plan.bitmap_kind)
        block = np.concatenate([block, signs])
        kept = tile[present]
        planes, rest = self._encode_symbols(kept, round_up(kept.size, 32))
        return block, np.concatenate([head, planes, rest])

    def decode(self, block: Bytes, record: Bytes, count: int) -> Elements:
        """Return the `count` elements of a tile from its fixed block and record."""
        reader = _Reader(record)
        if self._plan.mode is Mode.INTEGER:
            return self._decode_integers(reader, count)
        if not self._plan.bitmap:
            return self._decode_symbols(_Reader(block), reader, round_up(count, 128), count)
        plane_a, signs = self._split_block(block, count)
        present = _decode_bitmap(plane_a, reader, self._plan.bitmap_kind, count)
        kept = int(present.sum())
        tile = np.full(count, self._plan.fill, self._word)
        tile[present] = self._decode_symbols(reader, reader, round_up(kept, 32), kept)
        if self._plan.keeps_signs_apart:
            tile[np.unpackbits(signs, bitorder="little")[:count].astype(np.bool_)] |= self._sign
        return tile

    def _split_block(self, block: Bytes, count: int) -> tuple[Bytes, Bytes]:
        """Return the bitmap's plane A and the plane of signs, which may be empty."""
        end = bitmap_bytes(self._plan.bitmap_kind, count)
        return block[:end], block[end:]

    def _encode_symbols(self, tile: Elements, padded: int) -> tuple[Bytes, Bytes]:
        """Return the planes of residues and first codes, and level 2 with the escapes."""
        plan = self._plan
        first, second = plan.slots
        symbols, residues = self._split(tile)
        index = self._lookup(symbols, tile)
        code1 = np.minimum(index, first)
        planes = [
            pack_planes(residues, plan.residue_bits, padded),
            pack_planes(code1, plan.k1, padded),
        ]
        code2 = np.minimum(index[index >= first] - first, second)
        escaped = index >= first + second
        escapes = (tile if plan.drop else symbols)[escaped].astype(self._escape)
        rest = [
            pack_planes(code2, plan.k2, round_up(code2.size, 8)),
            escapes.view(np.uint8),
        ]
        return np.concatenate(planes), np.concatenate(rest)

    def _decode_symbols(self, planes: _Reader, rest: _Reader, padded: int, count: int) -> Elements:
        residues = planes.take_planes(self._plan.residue_bits, padded, count)
        index = planes.take_planes(self._plan.k1, padded, count)
        missed = index == self._plan.slots[0]
        pending = int(missed.sum())
        index[missed] += rest.take_planes(self._plan.k2, round_up(pending, 8), pending)
        symbols = self._entries[index]
        escaped = index == sum(self._plan.slots)
        raw = rest.take(int(escaped.sum()) * self._escape.itemsize)
        escapes = np.frombuffer(raw.tobytes(), self._escape).astype(np.uint64)
        if self._plan.drop:
            elements = self._join(symbols, residues)
            elements[escaped] = escapes
        else:
            symbols[escaped] = escapes
            elements = self._join(symbols, residues)
        return elements.astype(self._word)

    def _split(self, tile: Elements) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return symbols and residues."""
        plan, width = self._plan, self._dtype.width - self._plan.drop
        value = tile.astype(np.uint64) >> np.uint64(plan.drop)
        if plan.rotate:
            sign = value >> np.uint64(width - 1)
            value = ((value << np.uint64(1)) | sign) & _mask(width)
        return value >> np.uint64(plan.residue_bits), value & _mask(plan.residue_bits)

    def _join(
        self, symbols: NDArray[np.uint64], residues: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Return the values whose `_split` is these symbols and residues."""
        plan, width = self._plan, self._dtype.width - self._plan.drop
        value = ((symbols << np.uint64(plan.residue_bits)) | residues) & _mask(width)
        if plan.rotate:
            value = (value >> np.uint64(1)) | ((value & np.uint64(1)) << np.uint64(width - 1))
        return value << np.uint64(plan.drop)

    def _lookup(self, symbols: NDArray[np.uint64], tile: Elements) -> NDArray[np.int64]:
        """Return each symbol's dictionary index; the number of all slots if it has no entry."""
        missing = sum(self._plan.slots)
        entries = self._entries[self._sorted]
        if not entries.size:
            return np.full(symbols.size, missing)
        near = np.minimum(np.searchsorted(entries, symbols), entries.size - 1)
        index = np.where(entries[near] == symbols, self._sorted[near], missing)
        dropped = tile.astype(np.uint64) & _mask(self._plan.drop)
        return np.where(dropped != 0, missing, index)

    def _encode_integers(self, tile: Elements) -> Bytes:
        ordered = tile.view(f"<i{tile.itemsize}") if self._dtype.is_signed_integer else tile
        least, most = int(ordered.min()), int(ordered.max())
        base = least & int(_mask(self._dtype.width))
        width = (most - least).bit_length()
        head = np.array([base, width], "<u8").view(np.uint8)
        offsets = (tile.astype(np.uint64) - np.uint64(base)) & _mask(self._dtype.width)
        return np.concatenate([head, pack_planes(offsets, width, round_up(tile.size, 32))])

    def _decode_integers(self, record: _Reader, count: int) -> Elements:
        head = record.take(_INTEGER_HEAD_BYTES)
        base = np.frombuffer(head[:8].tobytes(), "<u8")[0]
        width = int(head[8])
        if width > self._dtype.width:
            raise CorruptBlob(f"integers of {width} bits in a tile of {self._dtype.name.lower()}")
        offsets = record.take_planes(width, round_up(count, 32), count)
        elements: Elements = (offsets + base).astype(self._word)
        return elements


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _encode_bitmap(present: NDArray[np.bool_], kind: int) -> tuple[Bytes, Bytes]:
    """Return the part of the bitmap in the fixed block, and the part in the record."""
    if kind == layout.BITMAP_PLAIN:
        return _bits(present, 128), np.empty(0, np.uint8)
    padded = np.zeros(round_up(present.size, 256), np.bool_)
    padded[: present.size] = present
    first, second = padded[::2], padded[1::2]
    occupied = first | second
    head = [_bits(second[occupied], 32), _bits(first[second], 32)]
    return _bits(occupied, 128), np.concatenate(head)


def _decode_bitmap(block: Bytes, record: _Reader, kind: int, count: int) -> NDArray[np.bool_]:
    plane_a = np.unpackbits(block, bitorder="little").astype(np.bool_)
    if kind == layout.BITMAP_PLAIN:
        return plane_a[:count]
    pairs = np.zeros((plane_a.size, 2), np.bool_)
    occupied = np.flatnonzero(plane_a)
    second = record.take_planes(1, round_up(occupied.size, 32), occupied.size).astype(np.bool_)
    with_second = occupied[second]
    both = record.take_planes(1, round_up(with_second.size, 32), with_second.size)
    pairs[occupied, 1] = second
    pairs[occupied, 0] = ~second
    pairs[with_second, 0] = both.astype(np.bool_)
    return pairs.reshape(-1)[:count]


def _bits(flags: NDArray[np.bool_], multiple: int) -> Bytes:
    return pack_planes(flags.astype(np.uint64), 1, round_up(flags.size, multiple))
