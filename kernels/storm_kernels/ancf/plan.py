"""The parameters of a blob's tiles, and the sizes and offsets that follow from them.

choose.py chooses one `Plan` per blob, or `read_header` reads it. `Geometry` is a pure function of
plan, dtype and size, so encoder and decoder always agree about the offset of each section.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import layout
from .dtypes import DType
from .layout import Mode

__all__ = ["DROPS", "Geometry", "Plan", "bitmap_bytes", "max_encoded_bytes", "round_up"]

FAST, DENSE, TERNARY = (3, 0), ((2, 3), (3, 4)), (2, 0)  # (k1, k2)
DROPS = {32: (16, 13), 64: (29,)}  # by width: the numbers of low bits that can be dropped
_WHOLE_VALUE_CODES = {Mode.TERNARY: (TERNARY,), Mode.VALUES: ((7, 0), (8, 0), (9, 0))}
_WINDOW_CODES = {
    Mode.WINDOW: (FAST, *DENSE),
    Mode.TRUNCATED: DENSE,
    Mode.SPARSE: DENSE,
}
_FLAT = frozenset({Mode.RAW, Mode.CONSTANT, Mode.BOOLEAN})  # no tiles


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def max_encoded_bytes(nbytes: int, dtype: DType) -> int:  # noqa: ARG001 (part of the contract)
    """Return the maximum size of a blob of `nbytes` original bytes, in any mode."""
    return layout.HEADER_BYTES + nbytes


def bitmap_bytes(kind: int, count: int) -> int:
    """Return the size of plane A of a tile of `count` elements."""
    return round_up(count, 256) // 16 if kind == layout.BITMAP_PAIRS else round_up(count, 128) // 8


@dataclass(frozen=True)
class Plan:
    """The parameters of FORMAT.md's sections 4 to 7; names as in the header."""

    mode: Mode
    bitmap: int = layout.BITMAP_NONE
    rotate: int = 0
    drop: int = 0
    residue_bits: int = 0
    k1: int = 0
    k2: int = 0
    fill: int = 0
    dictionary: tuple[int, ...] = ()

    @property
    def has_tiles(self) -> bool:
        """Whether blobs have a directory and records."""
        return self.mode not in _FLAT

    @property
    def dictionary_is_apart(self) -> bool:
        """Whether the dictionary is u64 entries after the header, not u16 entries inside it."""
        return self.mode in _WHOLE_VALUE_CODES

    @property
    def bitmap_kind(self) -> int:
        """The kind of the bitmap without the flag for separate signs."""
        return self.bitmap & ~layout.BITMAP_SIGNS

    @property
    def keeps_signs_apart(self) -> bool:
        """Whether signs have a separate plane and elements are coded without signs."""
        return bool(self.bitmap & layout.BITMAP_SIGNS)

    @property
    def slots(self) -> tuple[int, int]:
        """The maximum numbers of dictionary entries of level 1 and level 2."""
        return (1 << self.k1) - 1 if self.k1 else 0, (1 << self.k2) - 1 if self.k2 else 0

    def symbol_bits(self, dtype: DType) -> int:
        """Return the bits of a symbol (s)."""
        return dtype.width - self.drop - self.residue_bits

    def escape_bytes(self, dtype: DType) -> int:
        """Return the bytes of one escape (e)."""
        if not self.k1:
            return 0
        bits = dtype.width if self.drop else self.symbol_bits(dtype)
        return next(size for size in (1, 2, 4, 8) if bits <= 8 * size)

    def problem(self, dtype: DType) -> str | None:
        """Return why no encoder writes this plan for `dtype` (FORMAT.md, section 12), or None."""
        if self.fill and self.mode not in (Mode.SPARSE, Mode.CONSTANT):
            return f"a fill value in mode {self.mode.name.lower()}"
        if self.mode in _WINDOW_CODES:
            return self._window_problem(dtype)
        if self.bitmap or self.rotate or self.drop or self.residue_bits:
            return f"mode {self.mode.name.lower()} takes no bitmap, rotation, drop or residue"
        if (self.k1, self.k2) not in _WHOLE_VALUE_CODES.get(self.mode, ((0, 0),)):
            return f"codes of {self.k1} and {self.k2} bits in mode {self.mode.name.lower()}"
        return self._dictionary_problem()

    def _window_problem(self, dtype: DType) -> str | None:
        if (self.k1, self.k2) not in _WINDOW_CODES[self.mode]:
            return f"codes of {self.k1} and {self.k2} bits in mode {self.mode.name.lower()}"
        bitmaps = (1, 2, 5, 6) if self.mode is Mode.SPARSE else (0,)
        if self.bitmap not in bitmaps:
            return f"bitmap kind {self.bitmap} in mode {self.mode.name.lower()}"
        if self.keeps_signs_apart and (self.rotate or self.fill):
            return f"signs apart with rotation {self.rotate} and fill value {self.fill:#x}"
        if self.drop not in self._drops(dtype):
            return f"{self.drop} dropped bits of {dtype.name.lower()}"
        if self.rotate > 1 or self.residue_bits != dtype.mantissa_bits - self.drop + self.rotate:
            return f"{self.residue_bits} residue bits with rotation {self.rotate}"
        return self._dictionary_problem()

    def _drops(self, dtype: DType) -> tuple[int, ...]:
        truncated = DROPS.get(dtype.width, ())
        return {Mode.WINDOW: (0,), Mode.SPARSE: (0, *truncated)}.get(self.mode, truncated)

    def _dictionary_problem(self) -> str | None:
        if len(self.dictionary) > sum(self.slots):
            return f"{len(self.dictionary)} dictionary entries for {sum(self.slots)} slots"
        return None


@dataclass(frozen=True)
class Geometry:
    """The sections of a blob of `raw_nbytes` original bytes; offsets and sizes are in bytes."""

    plan: Plan
    dtype: DType
    raw_nbytes: int

    @property
    def elements(self) -> int:
        """The total number of coded elements (n)."""
        return self.raw_nbytes // self.dtype.element_bytes

    @property
    def tiles(self) -> int:
        """The number of tiles; the directory has one entry more."""
        return -(-self.elements // layout.TILE) if self.plan.has_tiles else 0

    @property
    def directory_offset(self) -> int:
        """Start of the directory, after the dictionary."""
        apart = 8 << self.plan.k1 if self.plan.dictionary_is_apart else 0
        return layout.HEADER_BYTES + round_up(apart, layout.DIRECTORY_ALIGN)

    @property
    def fixed_offset(self) -> int:
        """Start of the fixed blocks, or of a tile-less mode's bytes."""
        if not self.plan.has_tiles:
            return layout.HEADER_BYTES
        return self.directory_offset + round_up(4 * (self.tiles + 1), layout.DIRECTORY_ALIGN)

    @property
    def payload_offset(self) -> int:
        """End of the fixed blocks, where the records start."""
        return self.fixed_offset + self._fixed_bytes()

    def block_bytes(self, count: int) -> int:
        """Return the size of the fixed block of a tile of `count` elements (F)."""
        plan = self.plan
        if plan.bitmap:
            signs = round_up(count, 128) // 8 if plan.keeps_signs_apart else 0
            return bitmap_bytes(plan.bitmap_kind, count) + signs
        return round_up(count, 128) // 8 * (plan.residue_bits + plan.k1)

    def tile_elements(self, tile: int) -> int:
        """Return the number of elements of tile number `tile`."""
        return min(layout.TILE, self.elements - tile * layout.TILE)

    def block_offset(self, tile: int) -> int:
        """Return the offset of the fixed block of tile number `tile`."""
        return self.fixed_offset + tile * self.block_bytes(layout.TILE)

    def _fixed_bytes(self) -> int:
        if self.plan.mode is Mode.RAW:
            return self.raw_nbytes
        if self.plan.mode is Mode.CONSTANT:
            return 0
        if self.plan.mode is Mode.BOOLEAN:
            return round_up(-(-self.elements // 8), 16)
        whole, rest = divmod(self.elements, layout.TILE)
        return whole * self.block_bytes(layout.TILE) + self.block_bytes(rest)
