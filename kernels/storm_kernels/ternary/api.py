"""The public functions on planes: they check arguments, select a backend, and convert results.

A result has the type and device of the arguments. On the host all backends return the same bits;
integer results on CUDA are the same too. Float results on CUDA follow DESIGN.md, "Order of
summation".
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import resolve, setting
from ..errors import UsageError
from ..registry import implementation
from .arrays import as_given, bytes_of, device_type, floats_of, is_tensor, kind_of, placed
from .planes import (
    LANE_COLUMNS,
    Array,
    Kind,
    Product,
    Shape,
    check_threshold,
    group_count,
    least_row_bytes,
    packed_bytes,
    refuse_value,
    row_bytes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .tensor import TernaryTensor

__all__ = ["checked_scale", "decode", "dot", "encode", "matmul", "matvec", "pack", "unpack"]


def encode(
    values: Array, threshold: float | None = None, *, backend: str = "auto"
) -> tuple[Array, Array]:
    """Return the two planes of `values`, uint8 of shape (..., bytes of a row).

    A row is the last dimension; its bytes are a multiple of 8. Without a threshold the values must
    be -1, 0 or 1. With a threshold, values above it become 1, values below its negative become -1,
    and all others 0. The threshold is first rounded to float32, except for float64 values. On CUDA
    the call waits for the device, to check that all values are valid.

    Raises UsageError for a bad threshold, or for a value that cannot be encoded; the message names
    the first such value.
    """
    limit = check_threshold(threshold)
    array = _widened(values if is_tensor(values) else np.asarray(values))
    if array.ndim < 1:
        raise UsageError("values is a single number; give an array of at least one dimension")
    name, ops = _backend(backend, device_type(array))
    shape = tuple(int(one) for one in array.shape)
    kind = kind_of(array)
    data = placed(array, name)
    if kind is None:
        data, kind, limit = _signs(data, limit), Kind.INT8, None
    try:
        bit0, bit1 = ops.encode(data.reshape((math.prod(shape[:-1]), shape[-1])), kind, limit)
    except UsageError:
        _name_refused(data, kind, shape, limit)
        raise
    out = (*shape[:-1], row_bytes(shape[-1]))
    return as_given(bit0.reshape(out), array), as_given(bit1.reshape(out), array)


def decode(
    bit0: Array,
    bit1: Array,
    shape: int | Shape | None = None,
    dtype: Any = None,
    *,
    backend: str = "auto",
) -> Array:
    """Return the values of two planes, as int8 or another `dtype` of NumPy or torch.

    `shape` is the shape of the values: the planes' shape except for the last dimension, which may
    also be given alone. Without `shape` a row has all values of its bytes, including zeros at its
    end.

    Raises UsageError if planes and shape do not match, CorruptBlob if bit1 is set without bit0.
    """
    name, ops = _backend(backend, device_type(bit0))
    plane0, plane1 = _planes(bit0, bit1, name, "bit")
    full = _values_shape(tuple(plane0.shape), shape)
    flat = (math.prod(full[:-1]), int(plane0.shape[-1]))
    is_float = dtype is not None and str(dtype).endswith(("float32", "float32'>"))
    values = ops.decode(
        plane0.reshape(flat), plane1.reshape(flat), full[-1],
        Kind.FLOAT32 if is_float else Kind.INT8,
    ).reshape(full)  # fmt: skip
    found = as_given(values, bit0)
    if dtype is None or is_float:
        return found
    return found.to(dtype) if is_tensor(found) else found.astype(dtype)


def dot(a0: Array, a1: Array, b0: Array, b1: Array, *, backend: str = "auto") -> Any:
    """Return the sum of a * b over all values of two pairs of planes of one shape.

    The result is an exact int; for tensors it is a zero-dimensional int64 tensor on their device.
    Raises UsageError if shapes differ, and CorruptBlob if bit1 is set without bit0. On CUDA such a
    value counts as 0 instead.
    """
    name, ops = _backend(backend, device_type(a0))
    first = _planes(a0, a1, name, "a")
    second = _planes(b0, b1, name, "b")
    if first[0].shape != second[0].shape:
        raise UsageError(
            f"a has planes of shape {tuple(first[0].shape)}, b of {tuple(second[0].shape)}"
        )
    total = ops.dot(*first, *second)
    if not is_tensor(a0) or is_tensor(total):
        return total
    import torch

    return torch.tensor(total, dtype=torch.int64, device=a0.device)


def matvec(
    w0: Array,
    w1: Array,
    x: Array | tuple[Array, Array] | TernaryTensor,
    *,
    scale: Array | float | None = None,
    group: int | None = None,
    threads: int = 1,
    backend: str = "auto",
) -> Array:
    """Return w @ x for one vector: `matmul` with `x` of shape (columns,) or its planes."""
    if _dimensions(x) != 1:
        raise UsageError(f"x has {_dimensions(x)} dimensions, a vector has 1; use matmul")
    return matmul(w0, w1, x, scale=scale, group=group, threads=threads, backend=backend)


def matmul(
    w0: Array,
    w1: Array,
    x: Array | tuple[Array, Array] | TernaryTensor,
    *,
    scale: Array | float | None = None,
    group: int | None = None,
    threads: int = 1,
    backend: str = "auto",
) -> Array:
    """Return x @ w.T: (..., columns) times the planes of (rows, columns) gives (..., rows).

    `x` is float32, bfloat16 or int8, or ternary: a pair of planes (then all columns of w's planes
    are used) or a TernaryTensor. `scale` multiplies the result: one number, one per row, or
    (rows, groups). Each group has `group` columns, a multiple of 32; the last may have fewer.

    Results are float32 for floats or with a scale, else exact integers: int32 if no sum can
    overflow it (below 2^24 columns of int8, 2^31 of ternary), else int64. `threads` is for the C
    backend. Planes on CUDA are not checked for invalid pairs; these count as 0.

    Raises UsageError for arguments that do not match, CorruptBlob for planes with invalid pairs
    (not on CUDA), BackendUnavailable for a missing backend.
    """
    name, ops = _backend(backend, device_type(w0))
    plane0, plane1 = _planes(w0, w1, name, "w")
    if plane0.ndim != 2:
        raise UsageError(f"w has planes of {plane0.ndim} dimensions; give (rows, bytes)")
    values, values1, kind, columns, leading = _operand(x, name, int(plane0.shape[1]))
    _check_width(int(plane0.shape[1]), columns)
    scales, group_columns = checked_scale(
        scale, group, (int(plane0.shape[0]), columns), name, plane0
    )
    if threads < 1:
        raise UsageError(f"threads is {threads}; it must be at least 1")
    product = Product(
        plane0, plane1, columns, values, kind, values1, scales, group_columns, threads
    )
    out = ops.multiply(product)
    return as_given(out.reshape((*leading, product.rows)), w0)


def pack(bit0: Array, bit1: Array, count: int, *, backend: str = "auto") -> Array:
    """Return `count` values of one row of planes in storage form, five per byte, as uint8.

    Raises UsageError if the planes are shorter, CorruptBlob if bit1 is set without bit0.
    """
    name, ops = _host_backend(backend)
    plane0, plane1 = _planes(bit0, bit1, name, "bit")
    if plane0.ndim != 1 or not 0 <= count <= 8 * plane0.size:
        raise UsageError(f"{count} values do not lie in planes of shape {tuple(plane0.shape)}")
    return as_given(ops.pack(plane0, plane1, count), bit0)


def unpack(packed: Array, count: int, *, backend: str = "auto") -> tuple[Array, Array]:
    """Return the planes of `count` values that `pack` stored, of shape (bytes of a row,).

    Raises CorruptBlob for bytes that encode no values or more than `count` values, and UsageError
    if `packed` does not have the size for `count` values.
    """
    name, ops = _host_backend(backend)
    data = bytes_of(packed, name, "packed")
    if data.ndim != 1 or count < 0 or data.size != packed_bytes(count):
        raise UsageError(f"{count} values are {packed_bytes(max(count, 0))} bytes, not {data.size}")
    bit0, bit1 = ops.unpack(data, count)
    return as_given(bit0[0], packed), as_given(bit1[0], packed)


def checked_scale(
    scale: Array | float | None,
    group: int | None,
    matrix: tuple[int, int],
    backend: str,
    like: Array,
) -> tuple[Array | None, int]:
    """Return scales as float32 (rows, groups), and the columns of a group, 0 for the whole row.

    Raises:
        UsageError: the scales do not match the rows, or the group is not a multiple of 32.
    """
    if group is not None and (group < 1 or group % LANE_COLUMNS):
        raise UsageError(f"group is {group}; it must be a multiple of {LANE_COLUMNS}")
    if scale is None:
        if group is not None:
            raise UsageError(f"group is {group}, and there is no scale; give scale (rows, groups)")
        return None, 0
    rows, columns = matrix
    found = floats_of(scale, backend, like)
    width = group_count(columns, group or 0)
    if group is None and found.ndim == 0:
        found = floats_of([float(found)] * rows, backend, like)
    if tuple(found.shape) not in {(rows, width)} | ({(rows,)} if group is None else set()):
        wanted = f"{(rows, width)}" if group else f"a number, {(rows,)} or {(rows, 1)}"
        raise UsageError(f"scale has shape {tuple(found.shape)}; give {wanted}")
    return found.reshape((rows, width)), group if group is not None and width > 1 else 0


# --- helpers ------------------------------------------------------------------------------------


def _backend(asked: str, device: str) -> tuple[str, ModuleType]:
    """Return the backend's name and module; the lookup on this machine is cached."""
    return _resolved(setting() if asked == "auto" else asked, device)


@cache
def _resolved(asked: str, device: str) -> tuple[str, ModuleType]:
    name = resolve(asked, device, "ternary")
    return name, implementation("ternary", name)


def _host_backend(asked: str) -> tuple[str, ModuleType]:
    name, ops = _backend(asked, "cpu")
    if name == "cuda":
        raise UsageError("packing is for storage on the host; choose backend 'cpu' or 'auto'")
    return name, ops


def _widened(array: Array) -> Array:
    """Return floats below 32 bits, except bfloat16, as float32: a threshold is of that type."""
    if not is_tensor(array):
        return array.astype(np.float32) if array.dtype == np.float16 else array
    is_narrow = array.is_floating_point() and array.itemsize < np.float32().itemsize
    return array.float() if is_narrow and kind_of(array) is None else array


def _signs(values: NDArray[Any] | Array, threshold: float | None) -> Array:
    """Return int8 signs of values whose dtype no backend reads; raise if a value is invalid."""
    if is_tensor(values):
        return _signs_of_tensor(values, threshold)
    if values.dtype.kind not in "biuf":
        raise UsageError(f"values are {values.dtype}; give integers or floats")
    limit = 0 if threshold is None else threshold
    with np.errstate(invalid="ignore"):
        above, below = values > limit, values < -limit if values.dtype.kind in "if" else None
    signs = above.astype(np.int8) if below is None else above.astype(np.int8) - below
    refused = values != signs if threshold is None else values != values  # noqa: PLR0124 (NaN)
    if refused.any():
        place = int(np.argmax(refused.reshape(-1)))
        refuse_value(place, values.shape, values.reshape(-1)[place], threshold)
    return np.ascontiguousarray(signs, dtype=np.int8)


def _signs_of_tensor(values: Array, threshold: float | None) -> Array:
    if values.is_complex():
        raise UsageError(f"values are {values.dtype}; give integers or floats")
    limit = 0 if threshold is None else threshold
    signs = (values > limit).char() - (values < -limit).char()
    refused = values != (signs if threshold is None else values)
    if bool(refused.any()):
        place = int(refused.reshape(-1).char().argmax())
        value = values.reshape(-1)[place].item()
        refuse_value(place, tuple(values.shape), value, threshold)
    return signs


def _name_refused(data: Array, kind: Kind, shape: Shape, threshold: float | None) -> None:
    """Raise UsageError about the first invalid value, with its index in the caller's shape."""
    host = placed(data, "numpy") if is_tensor(data) else data
    if kind is Kind.BFLOAT16:
        host = (host.astype(np.uint32) << 16).view(np.float32)
    _signs(host.reshape(shape), threshold)


def _planes(bit0: Array, bit1: Array, backend: str, name: str) -> tuple[Array, Array]:
    first, second = bytes_of(bit0, backend, f"{name}0"), bytes_of(bit1, backend, f"{name}1")
    if first.shape != second.shape:
        raise UsageError(
            f"{name}0 has shape {tuple(first.shape)}, {name}1 {tuple(second.shape)}; two planes "
            "have one shape"
        )
    return first, second


def _values_shape(planes: Shape, shape: int | Shape | None) -> Shape:
    if shape is None:
        return (*planes[:-1], 8 * planes[-1])
    full = (*planes[:-1], shape) if isinstance(shape, int) else tuple(shape)
    if len(full) != len(planes) or tuple(full[:-1]) != tuple(planes[:-1]) or full[-1] < 0:
        raise UsageError(f"planes of shape {planes} hold no values of shape {full}")
    _check_width(planes[-1], full[-1])
    return full


def _check_width(nbytes: int, columns: int) -> None:
    if not least_row_bytes(columns) <= nbytes <= row_bytes(columns):
        raise UsageError(
            f"rows of {nbytes} bytes do not hold {columns} columns, which take "
            f"{least_row_bytes(columns)} to {row_bytes(columns)}"
        )


def _dimensions(x: Array | tuple[Array, Array] | TernaryTensor) -> int:
    if isinstance(x, (tuple, list)):
        return int(x[0].ndim) if len(x) == 2 and hasattr(x[0], "ndim") else 1
    return len(np.shape(x)) if not hasattr(x, "shape") else len(x.shape)


def _operand(
    x: Array | tuple[Array, Array] | TernaryTensor, backend: str, w_bytes: int
) -> tuple[Array, Array | None, Kind, int, Shape]:
    """Return x as (batch, columns) or as bit0, then its bit1, kind, columns, leading dimensions."""
    if type(x) is np.ndarray:
        return _values_operand(x, backend)
    from .tensor import TernaryTensor

    if isinstance(x, TernaryTensor):
        if x.scale is not None:
            raise UsageError("x has scales of its own; multiply the result by them, or drop them")
        bit0, bit1 = _planes(*x.planes, backend, "x")
        return _rows(bit0), _rows(bit1), Kind.PLANES, x.shape[-1], x.shape[:-1]
    if isinstance(x, tuple):
        if len(x) != 2:
            raise UsageError(f"x is a tuple of {len(x)}; a ternary x is its two planes")
        bit0, bit1 = _planes(*x, backend, "x")
        if bit0.shape[-1] != w_bytes:
            raise UsageError(f"rows of w have {w_bytes} bytes, those of x {bit0.shape[-1]}")
        return _rows(bit0), _rows(bit1), Kind.PLANES, 8 * w_bytes, tuple(bit0.shape[:-1])
    return _values_operand(x if is_tensor(x) else np.asarray(x), backend)


def _values_operand(array: Array, backend: str) -> tuple[Array, None, Kind, int, Shape]:
    kind = kind_of(array)
    if kind is None or array.ndim < 1:
        raise UsageError(
            f"x is {array.dtype} of {array.ndim} dimensions; give float32, bfloat16, int8 or planes"
        )
    values = placed(array, backend)
    return _rows(values), None, kind, int(array.shape[-1]), tuple(array.shape[:-1])


def _rows(array: Array) -> Array:
    """Return an array (..., n) as (batch, n)."""
    return array.reshape((math.prod(array.shape[:-1]), array.shape[-1]))
