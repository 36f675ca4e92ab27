"""The public functions `cumsum`, `linear_scan` and `associative_scan`; they check, then compute.

Every function takes tensors of any strides and any length, including 0, on a CPU or CUDA device,
and returns new tensors. The same call gives the same bits in every run. Unsupported arguments raise
UsageError here, alike for all backends.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..errors import UsageError
from . import operators

__all__ = ["OPERATIONS", "associative_scan", "cumsum", "fused_associative_scan", "linear_scan"]

OPERATIONS: Final = ("add", "mul", "max", "min", "logaddexp")

_FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def cumsum(
    x: Tensor,
    dim: int = 1,
    reverse: bool = False,
    exclusive: bool = False,
    dtype: torch.dtype | None = None,
    *,
    compensated: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Return the running sums of `x` along `dim`; with `reverse` from the end.

    With `exclusive` each sum excludes its own element. `dtype` is the result's type, to which
    elements are converted first (default: the type of x; int64 for integers and bool). Sums of
    floats accumulate in float32 or better, those of float64 in float64. `compensated` also tracks
    the rounding error of each addition. The result is differentiable any number of times if x is
    floating point.

    Raises UsageError for an invalid type, dimension or backend.
    """
    _check_tensor("x", x, (*_FLOATS, *_INTEGERS, torch.bool))
    if dtype is not None and dtype not in (*_FLOATS, *_INTEGERS):
        raise UsageError(f"dtype {dtype} is none that sums are made in; choose a float or integer")
    if x.dim() == 0:
        one = cumsum(
            x[None], _dimension(x, dim), reverse, exclusive, dtype,
            compensated=compensated, backend=backend,
        )  # fmt: skip
        return one[0]
    dim = _dimension(x, dim)
    sums: Tensor = operators.cumsum(x, dim, reverse, exclusive, compensated, dtype, backend)
    return sums


def fused_associative_scan(x: Tensor, dim: int = 1, reverse: bool = False) -> Tensor:
    """Return `cumsum(x, dim, reverse)`; the literature on state-space layers uses this name."""
    return cumsum(x, dim, reverse)


def associative_scan(
    op: str, x: Tensor, dim: int = 1, reverse: bool = False, *, backend: str = "auto"
) -> Tensor:
    """Return the running results of `op`, one of OPERATIONS, along `dim`, with x's type.

    All results from a NaN on are NaN; integers wrap. The result is differentiable if x is floating
    point: of equal extrema the last gets the gradient, as in torch.cummax.

    Raises UsageError for an invalid operation, type, dimension or backend.
    """
    if op not in OPERATIONS:
        raise UsageError(f"op {op!r} is unknown; choose one of {', '.join(OPERATIONS)}")
    _check_tensor("x", x, _FLOATS if op == "logaddexp" else (*_FLOATS, *_INTEGERS))
    dim = _dimension(x, dim)
    results: Tensor = operators.fold(x if x.dim() else x[None], op, dim, reverse, backend)
    return results if x.dim() else results[0]


def linear_scan(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None = None,
    dim: int = 1,
    reverse: bool = False,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return all h_t = a_t h_(t-1) + b_t along `dim`, and the last; with `reverse` from the end.

    `a` and `b` are broadcast to one shape and promoted to one type, float or complex64. `initial`
    is the state before the first step (default: zero); its shape is that of a and b without `dim`.
    The last state is a view of the first result (or of `initial` if the length is 0): clone it if
    it must outlive the result. Half-precision types are computed in float32. The function is
    differentiable in a, b and initial, any number of times.

    A backend may combine sections of a sequence by the products of their `a`. If such products
    overflow, which requires |a| > 1, results may be infinite or NaN where a loop's are finite.

    Raises UsageError for invalid types, shapes, dimension or backend.
    """
    kinds = (*_FLOATS, torch.complex64)
    _check_tensor("a", a, kinds)
    _check_tensor("b", b, kinds)
    dtype, shape = a.dtype, a.shape
    if b.dtype is not dtype:
        dtype = torch.promote_types(dtype, b.dtype)
    if b.shape != shape:
        shape = _common_shape(a, b)
    if initial is not None:
        _check_tensor("initial", initial, kinds)
        dtype = torch.promote_types(dtype, initial.dtype)
    if dtype not in kinds:
        raise UsageError(f"{a.dtype} and {b.dtype} promote to {dtype}; convert them to complex64")
    if a.device != b.device or (initial is not None and initial.device != b.device):
        raise UsageError(f"a is on {a.device}, b on {b.device}: move them, and initial, together")
    a, b = _as(a, dtype, shape), _as(b, dtype, shape)
    if b.dim() == 0:
        raise UsageError("a and b have no dimension to scan along; unsqueeze them")
    dim = _dimension(b, dim)
    state_shape = shape[:dim] + shape[dim + 1 :]
    if initial is None:
        first = b.new_zeros(state_shape) if shape[dim] == 0 else None
    else:
        first = _state(initial.to(dtype), state_shape)
    h = operators.linear_scan(a, b, first, dim, reverse, backend)
    if shape[dim] == 0:
        assert first is not None
        return h, first
    return h, h.select(dim, 0 if reverse else shape[dim] - 1)


def _common_shape(a: Tensor, b: Tensor) -> torch.Size:
    try:
        shape: torch.Size = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call] # torch has no annotation
    except RuntimeError:
        raise UsageError(
            f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}: they cannot be broadcast"
        ) from None
    return shape


def _as(tensor: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return `tensor` converted and broadcast; skip PyTorch calls that do nothing, to save time."""
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.shape == shape else tensor.expand(shape)


def _state(initial: Tensor, shape: torch.Size) -> Tensor:
    try:
        return initial.expand(shape)
    except RuntimeError:
        raise UsageError(
            f"initial has shape {tuple(initial.shape)}; one state a sequence is {tuple(shape)}"
        ) from None


def _check_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{name} is a {type(tensor).__name__}, no torch tensor")
    if tensor.dtype not in dtypes:
        known = ", ".join(str(one).removeprefix("torch.") for one in dtypes)
        raise UsageError(f"{name} is {tensor.dtype}; this scan takes {known}")
    if tensor.layout is not torch.strided:
        raise UsageError(f"{name} is {tensor.layout}; scans take strided tensors: to_dense() first")


def _dimension(tensor: Tensor, dim: int) -> int:
    dims = max(1, tensor.dim())
    if not -dims <= dim < dims:
        raise UsageError(f"dim {dim} is out of range for a tensor of {tensor.dim()} dimensions")
    return dim % dims
