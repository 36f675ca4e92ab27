"""What a product's kernel has to know before there is a result: which exponents get a code.

The kernel writes ANCF's mode window with codes (3, 0), whose dictionary is a window: seven
exponents in a row. Any window is right, since what lies outside it is kept as an escape; a good
one is small. Everything else of a blob's layout follows from its size (ancf.plan).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..ancf import layout
from ..ancf.dtypes import DType
from ..ancf.header import Header
from ..ancf.plan import Geometry, Plan
from ..errors import UsageError

__all__ = [
    "CHUNK",
    "DTYPES",
    "SLOT_BYTES",
    "Window",
    "full_room",
    "geometry",
    "header",
    "window_of",
]

DTYPES: Final = (DType.BFLOAT16, DType.FLOAT16)
WIDTH: Final = 7  # exponents: codes 0 to 6 name them, 7 is an escape
CHUNK: Final = 128  # elements whose escapes lie together, kChunk of gemm_code.cuh
SLOT_BYTES: Final = 160  # of a chunk, kSlotBytes

_SPARE: Final = 64
"""A blob has room for one element in so many more than expected to escape."""


@dataclass(frozen=True, slots=True)
class Window:
    """Seven exponents from `base` on; `share` of the elements are expected to have another."""

    base: int
    share: float

    def room(self, dtype: DType, elements: int) -> int:
        """Return the bytes that a blob with this window is given; one that takes more is refused.

        A quarter more escapes than expected fit, and a 64th of the elements.
        """
        escapes = int(elements * (1.25 * self.share + 1 / _SPARE))
        place = geometry(dtype, elements)
        return min(
            _up(place.payload_offset + escapes + 8 * place.tiles), full_room(dtype, elements)
        )


def window_of(counts: Sequence[int], dtype: DType) -> Window:
    """Return the window for elements of which `counts[e]` have exponent e, the first best one."""
    symbols = 1 << _symbol_bits(dtype)
    if len(counts) != symbols or not sum(counts):
        raise UsageError(f"{len(counts)} counts of {sum(counts)} elements; give {symbols} counts")
    inside = [sum(counts[base : base + WIDTH]) for base in range(symbols - WIDTH)]
    base = max(range(len(inside)), key=lambda one: inside[one])
    return Window(base, 1 - inside[base] / sum(counts))


def full_room(dtype: DType, elements: int) -> int:
    """Return the bytes that no blob of the kernels exceeds, whatever its window."""
    place = geometry(dtype, elements)
    return _up(place.payload_offset + elements + 8 * place.tiles)


def geometry(dtype: DType, elements: int) -> Geometry:
    """Return where the parts of a blob lie, which no window changes."""
    return Geometry(_plan(dtype, ()), dtype, 2 * elements)


def header(dtype: DType, elements: int, base: int, payload_bytes: int = 0) -> Header:
    """Return the header of a blob whose window begins at `base`."""
    plan = _plan(dtype, tuple(range(base, base + WIDTH)))
    return Header(plan, dtype, 2 * elements, payload_bytes, None)


def _plan(dtype: DType, dictionary: tuple[int, ...]) -> Plan:
    if dtype not in DTYPES:
        raise UsageError(
            f"products of {dtype.name.lower()} are not encoded; use bfloat16 or float16"
        )
    residue_bits = dtype.mantissa_bits + 1
    return Plan(
        layout.Mode.WINDOW, rotate=1, residue_bits=residue_bits, k1=3, dictionary=dictionary
    )


def _symbol_bits(dtype: DType) -> int:
    return _plan(dtype, ()).symbol_bits(dtype)


def _up(nbytes: int) -> int:
    return -(-nbytes // 128) * 128
