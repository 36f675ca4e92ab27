"""The element types that ANCF supports, and their torch counterparts.

`DType` is the value in the header. This module maps torch dtypes by name, so importing it does not
load torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["DType", "dtype_of"]


class DType(IntEnum):
    """An element type; the value is the header's dtype byte."""

    BYTES = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3
    FLOAT64 = 4
    FLOAT8_E4M3FN = 5
    FLOAT8_E5M2 = 6
    BOOL = 7
    INT8 = 8
    UINT8 = 9
    INT16 = 10
    UINT16 = 11
    INT32 = 12
    UINT32 = 13
    INT64 = 14
    UINT64 = 15
    COMPLEX32 = 16
    COMPLEX64 = 17
    COMPLEX128 = 18

    @property
    def element_bytes(self) -> int:
        """Bytes of one coded element; for complex types, of one real part."""
        return _TRAITS[self].element_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one item of a tensor of this type."""
        return self.element_bytes * (2 if self.is_complex else 1)

    @property
    def width(self) -> int:
        """Bits of one coded element (w in FORMAT.md)."""
        return 8 * self.element_bytes

    @property
    def mantissa_bits(self) -> int:
        """Stored mantissa bits (M in FORMAT.md); for non-floats the value for a forced mode."""
        return _TRAITS[self].mantissa_bits

    @property
    def is_float(self) -> bool:
        """Whether elements are floating-point numbers, including those of complex types."""
        return _TRAITS[self].is_float

    @property
    def is_signed_integer(self) -> bool:
        """Whether elements compare as two's complement numbers."""
        return self in _SIGNED

    @property
    def is_complex(self) -> bool:
        """Whether an item is two elements."""
        return self >= DType.COMPLEX32

    @property
    def torch_name(self) -> str:
        """The attribute of `torch` that names this type; opaque bytes are uint8."""
        return "uint8" if self is DType.BYTES else self.name.lower()


@dataclass(frozen=True)
class _Traits:
    element_bytes: int
    mantissa_bits: int
    is_float: bool = False


_INTEGER_MANTISSA = {1: 3, 2: 7, 4: 23, 8: 52}  # by bytes: that of a float type of the same size
_SIGNED = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64})
_TRAITS = {
    DType.BFLOAT16: _Traits(2, 7, is_float=True),
    DType.FLOAT16: _Traits(2, 10, is_float=True),
    DType.FLOAT32: _Traits(4, 23, is_float=True),
    DType.FLOAT64: _Traits(8, 52, is_float=True),
    DType.FLOAT8_E4M3FN: _Traits(1, 3, is_float=True),
    DType.FLOAT8_E5M2: _Traits(1, 2, is_float=True),
    DType.COMPLEX32: _Traits(2, 10, is_float=True),
    DType.COMPLEX64: _Traits(4, 23, is_float=True),
    DType.COMPLEX128: _Traits(8, 52, is_float=True),
}
for _size, _members in {
    1: (DType.BYTES, DType.BOOL, DType.INT8, DType.UINT8),
    2: (DType.INT16, DType.UINT16),
    4: (DType.INT32, DType.UINT32),
    8: (DType.INT64, DType.UINT64),
}.items():
    _TRAITS.update(dict.fromkeys(_members, _Traits(_size, _INTEGER_MANTISSA[_size])))


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the `DType` of a torch dtype.

    Raises UsageError for types that ANCF does not support (quantised and sub-byte types).
    """
    name = str(dtype).removeprefix("torch.").upper()
    try:
        return DType[name]
    except KeyError:
        known = ", ".join(d.torch_name for d in DType)
        raise UsageError(f"ANCF cannot encode dtype {dtype}; it knows {known}") from None
