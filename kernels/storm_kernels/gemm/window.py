"""Windows: the exponents that get a code, which a kernel must know before it has a result.

The kernel writes ANCF's mode window with codes (3, 0). Its dictionary is a window of seven
consecutive exponents. Any window is correct, since elements outside it become escapes; a good
window makes the blob small. The rest of a blob's layout follows from its size (ancf.plan).
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
CHUNK: Final = 128  # elements that share a slot for their escapes, kChunk of gemm_code.cuh
SLOT_BYTES: Final = 160  # bytes of a chunk's slot, kSlotBytes

_SPARE: Final = 64
"""A blob's buffer has extra space for escapes of one element in 64."""


@dataclass(frozen=True, slots=True)
class Window:
    """Seven exponents from `base` on; `share` is the expected share of elements outside it."""

    base: int
    share: float

    def room(self, dtype: DType, elements: int) -> int:
        """Return the buffer size in bytes for a blob with this window; larger blobs do not fit.

        The buffer has space for a quarter more escapes than expected, and for a 64th of the
        elements.
        """
        escapes = int(elements * (1.25 * self.share + 1 / _SPARE))
        place = geometry(dtype, elements)
        return min(
            _up(place.payload_offset + escapes + 8 * place.tiles), full_room(dtype, elements)
        )


def window_of(counts: Sequence[int], dtype: DType) -> Window:
    """Return the best window (the first of equals) if `counts[e]` elements have exponent e."""
    symbols = 1 << _symbol_bits(dtype)
    if len(counts) != symbols or not sum(counts):
        raise UsageError(f"{len(counts)} counts of {sum(counts)} elements; give {symbols} counts")
    inside = [sum(counts[base : base + WIDTH]) for base in range(symbols - WIDTH)]
    base = max(range(len(inside)), key=lambda one: inside[one])
    return Window(base, 1 - inside[base] / sum(counts))


def full_room(dtype: DType, elements: int) -> int:
    """Return an upper bound, in bytes, for the kernels' blobs with any window."""
    place = geometry(dtype, elements)
    return _up(place.payload_offset + elements + 8 * place.tiles)


def geometry(dtype: DType, elements: int) -> Geometry:
    """Return the offsets of a blob's sections, which do not depend on the window."""
    return Geometry(_plan(dtype, ()), dtype, 2 * elements)


def header(dtype: DType, elements: int, base: int) -> Header:
    """Return the header of a blob without records whose window begins at `base`."""
    plan = _plan(dtype, tuple(range(base, base + WIDTH)))
    return Header(plan, dtype, 2 * elements, 0, None)


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
