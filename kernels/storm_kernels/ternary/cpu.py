"""Ternary tensors by the C library: the results of reference.py, bit for bit, at memory speed.

Arrays are NumPy arrays on the host with any alignment. Each call releases the interpreter lock.
`CpuTernary` restricts calls to one variant, so that tests can run each variant.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from ..errors import BackendUnavailable, CorruptBlob, UsageError
from ..native import Status, load
from .planes import (
    ROW_ALIGN,
    Kind,
    Product,
    aligned_plane,
    packed_bytes,
    refuse_pair,
    refuse_value,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "CpuTernary",
    "Variant",
    "available_variants",
    "decode",
    "dot",
    "encode",
    "multiply",
    "pack",
    "probe",
    "unpack",
]


class Variant(IntEnum):
    """The library's variants; the values are `enum storm_ternary_variant` in ternary.h."""

    BEST = -1
    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_VNNI = 3
    NEON = 4
    NEON_DOT = 5


class _Product(ctypes.Structure):
    """`struct storm_ternary_product` in ternary.h."""

    _fields_ = (
        ("bit0", ctypes.c_void_p),
        ("bit1", ctypes.c_void_p),
        ("pitch", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
        ("batch", ctypes.c_uint64),
        ("x", ctypes.c_void_p),
        ("x_bit1", ctypes.c_void_p),
        ("x_pitch", ctypes.c_uint64),
        ("scale", ctypes.c_void_p),
        ("group", ctypes.c_uint64),
        ("out", ctypes.c_void_p),
        ("x_kind", ctypes.c_int32),
        ("out_kind", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("variant", ctypes.c_int32),
    )


def probe() -> tuple[bool, str]:
    """Return whether the library works here, and its best variant or the reason why not."""
    try:
        best = available_variants()[-1]
    except BackendUnavailable as missing:
        return False, str(missing)
    return True, best.name.lower()


@cache
def available_variants() -> tuple[Variant, ...]:
    """Return the variants that this build and this processor support, the best last."""
    library = _library()
    every = (one for one in Variant if one is not Variant.BEST)
    return tuple(one for one in every if library.storm_ternary_available(one))


@dataclass(frozen=True)
class CpuTernary:
    """The functions of this module, restricted to one variant.

    Methods raise BackendUnavailable when the library or the variant is missing.
    """

    variant: Variant = Variant.BEST

    def encode(
        self, values: NDArray[Any], kind: Kind, threshold: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the planes of (rows, columns) values; see reference.encode."""
        rows, columns = values.shape
        bit0, bit1 = aligned_plane(rows, columns), aligned_plane(rows, columns)
        if kind is Kind.INT8 and threshold is not None:
            values, kind = values.astype(np.float32), Kind.FLOAT32
        refused = ctypes.c_uint64()
        status = _library().storm_ternary_encode(
            _address(values),
            kind,
            rows,
            columns,
            -1.0 if threshold is None else threshold,
            _address(bit0),
            _address(bit1),
            bit0.shape[1],
            self.variant,
            ctypes.byref(refused),
        )
        if status == _CORRUPT:
            place = int(refused.value)
            value = values.reshape(-1)[place : place + 1]
            if kind is Kind.BFLOAT16:
                value = (value.astype(np.uint32) << 16).view(np.float32)
            refuse_value(place, values.shape, value[0], threshold)
        self._check(status)
        return bit0, bit1

    def decode(
        self, bit0: NDArray[np.uint8], bit1: NDArray[np.uint8], columns: int, kind: Kind
    ) -> NDArray[Any]:
        """Return (rows, columns) values as int8 or float32; raises CorruptBlob."""
        rows = bit0.shape[0]
        values = np.empty((rows, columns), np.int8 if kind is Kind.INT8 else np.float32)
        refused = ctypes.c_uint64()
        status = _library().storm_ternary_decode(
            _address(bit0),
            _address(bit1),
            bit0.shape[1],
            rows,
            columns,
            _address(values),
            kind,
            self.variant,
            ctypes.byref(refused),
        )
        if status == _CORRUPT:
            refuse_pair(int(refused.value), values.shape)
        self._check(status)
        return values

    def dot(
        self,
        a0: NDArray[np.uint8],
        a1: NDArray[np.uint8],
        b0: NDArray[np.uint8],
        b1: NDArray[np.uint8],
    ) -> int:
        """Return the sum of a * b over all bits; raises CorruptBlob."""
        total = ctypes.c_int64()
        status = _library().storm_ternary_dot(
            _address(a0),
            _address(a1),
            _address(b0),
            _address(b1),
            a0.size,
            self.variant,
            ctypes.byref(total),
        )
        if status == _CORRUPT:
            refuse_pair()
        self._check(status)
        return total.value

    def multiply(self, product: Product) -> NDArray[Any]:
        """Return (batch, rows) results; see reference.multiply. Raises CorruptBlob."""
        x, x1, scale, out_kind = product.x, product.x1, product.scale, product.out_kind
        rows, batch = product.bit0.shape[0], x.shape[0]
        out = np.empty((batch, rows), _DTYPES[out_kind])
        asked = _Product(
            _address(product.bit0),
            _address(product.bit1),
            product.bit0.shape[1],
            rows,
            product.columns,
            batch,
            _address(x),
            None if x1 is None else _address(x1),
            x.shape[1] * x.itemsize,
            None if scale is None else _address(scale),
            product.group,
            _address(out),
            product.kind,
            out_kind,
            product.threads,
            self.variant,
        )
        status = _library().storm_ternary_multiply(ctypes.byref(asked))
        if status == _CORRUPT:
            refuse_pair()
        self._check(status)
        return out

    def pack(
        self, bit0: NDArray[np.uint8], bit1: NDArray[np.uint8], count: int
    ) -> NDArray[np.uint8]:
        """Return `count` values of one row, five per byte; raises CorruptBlob."""
        packed = np.empty(packed_bytes(count), np.uint8)
        status = _library().storm_ternary_pack(
            _address(bit0), _address(bit1), count, _address(packed), self.variant
        )
        if status == _CORRUPT:
            refuse_pair()
        self._check(status)
        return packed

    def unpack(
        self, packed: NDArray[np.uint8], count: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the planes of `count` packed values, as one row; raises CorruptBlob."""
        bit0, bit1 = aligned_plane(1, count), aligned_plane(1, count)
        bit0[:, -ROW_ALIGN:], bit1[:, -ROW_ALIGN:] = (
            0,
            0,
        )  # the library writes only up to the last value
        status = _library().storm_ternary_unpack(
            _address(packed), count, _address(bit0), _address(bit1), self.variant
        )
        if status == _CORRUPT:
            raise CorruptBlob(
                f"of {packed.size} packed bytes one stands for no five values, or for one beyond "
                f"the last of {count}"
            )
        self._check(status)
        return bit0, bit1

    def _check(self, status: int) -> None:
        if status != 0:
            self._fail(status)

    def _fail(self, status: int) -> NoReturn:
        if status == Status.NO_MEMORY:
            raise MemoryError("no memory for a copy of x")
        if status == Status.UNSUPPORTED:
            there = ", ".join(one.name.lower() for one in available_variants())
            raise BackendUnavailable(
                f"{self.variant.name.lower()} is missing here; there are {there}"
            )
        raise UsageError(f"the library refuses the arguments ({Status(status).name})")


_DTYPES: Final = {Kind.FLOAT32: np.float32, Kind.INT32: np.int32, Kind.INT64: np.int64}


@cache
def _library() -> ctypes.CDLL:
    """Return the library with this package's functions declared."""
    library = load()
    address, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    library.storm_ternary_available.argtypes = [number]
    library.storm_ternary_encode.argtypes = [
        address, number, size, size, ctypes.c_float, address, address, size, number,
        ctypes.POINTER(ctypes.c_uint64),
    ]  # fmt: skip
    library.storm_ternary_decode.argtypes = [
        address, address, size, size, size, address, number, number,
        ctypes.POINTER(ctypes.c_uint64),
    ]  # fmt: skip
    library.storm_ternary_dot.argtypes = [
        address, address, address, address, size, number, ctypes.POINTER(ctypes.c_int64),
    ]  # fmt: skip
    library.storm_ternary_multiply.argtypes = [ctypes.POINTER(_Product)]
    library.storm_ternary_pack.argtypes = [address, address, size, address, number]
    library.storm_ternary_unpack.argtypes = [address, size, address, address, number]
    return library


_CORRUPT: Final = int(Status.CORRUPT)


def _address(array: NDArray[Any]) -> int:
    """Return the array's address, faster than `array.ctypes.data`."""
    if array.flags.writeable and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    return int(array.ctypes.data)


_DEFAULT: Final = CpuTernary()
encode = _DEFAULT.encode
decode = _DEFAULT.decode
dot = _DEFAULT.dot
multiply = _DEFAULT.multiply
pack = _DEFAULT.pack
unpack = _DEFAULT.unpack
