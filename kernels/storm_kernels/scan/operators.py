"""The scans as PyTorch operators `storm_kernels::...`: each with a fake kernel, gradients, vmap.

Gradients use these operators themselves, so any order of differentiation works. Results, also fake
ones, have the strides of `torch.empty_like` of the input. Only the backend's kernels access the
data, so torch.compile treats each operator as opaque. Under autocast the operators take and return
float32, as torch.cumsum does on CUDA. api.py has checked the arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import custom_op

from ..backends import resolve, setting
from ..errors import UsageError
from ..registry import implementation
from .calls import Operator

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cumsum", "fold", "linear_scan", "linear_scan_gradient", "sum_dtype"]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the default type of sums of `dtype`: int64 for integers and bool."""
    return dtype if dtype.is_floating_point else torch.int64


@lru_cache(maxsize=64)
def _found(function: str, backend: str, device: str, _setting: str) -> tuple[str, Any]:
    """Return the backend's name and function for a call; cached, since the lookup takes 25 us."""
    name = resolve(backend, device, "scan")
    return name, getattr(implementation("scan", name), function)


def _run(
    function: str,
    backend: str,
    sources: Sequence[Tensor | None],
    results: Sequence[Tensor],
    dim: int,
    **options: Any,
) -> None:
    """Fill `results` by a backend's function; a host backend gets host copies of device tensors."""
    device = results[0].device
    name, work = _found(function, backend, device.type, setting())
    if name == "cuda" and device.type != "cuda":
        raise UsageError(f"backend 'cuda' was asked to scan a tensor on {device}")
    if not results[0].numel():
        return
    if name == "cuda" or device.type == "cpu":
        work(*sources, *results, dim, **options)
        return
    copies = [None if one is None else one.cpu() for one in sources]
    made = [torch.empty_like(one, device="cpu") for one in results]
    work(*copies, *made, dim, **options)
    for result, one in zip(results, made, strict=True):
        result.copy_(one)


# --- sums -----------------------------------------------------------------------------------


def _cumsum(
    x: Tensor,
    dim: int,
    reverse: bool,
    exclusive: bool,
    compensated: bool,
    dtype: torch.dtype | None,
    backend: str,
) -> Tensor:
    """Return the running sums of `x` as `dtype`."""
    y = torch.empty_like(x, dtype=dtype or sum_dtype(x.dtype))
    compensated = compensated and y.dtype.is_floating_point
    options = {"reverse": reverse, "exclusive": exclusive, "compensated": compensated}
    _run("fold", backend, [x], [y], dim, op="add", **options)
    return y


def _cumsum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 (torch's signature)
    x, *ctx.options = inputs
    ctx.dtype = x.dtype


def _cumsum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dim, reverse, exclusive, compensated, _, backend = ctx.options
    back = cumsum(grad, dim, not reverse, exclusive, compensated, ctx.dtype, backend)
    return (back, *(None for _ in ctx.options))


def _cumsum_vmap(_info: Any, in_dims: tuple[Any, ...], x: Tensor, dim: int, *rest: Any) -> Any:
    return cumsum(x.movedim(in_dims[0], 0), dim + 1, *rest), 0


cumsum = Operator(
    custom_op("storm_kernels::cumsum", _cumsum, mutates_args=()),
    _cumsum,
    _cumsum_setup,
    _cumsum_backward,
    _cumsum_vmap,
)


@cumsum.op.register_fake
def _(
    x: Tensor,
    _dim: int,
    _reverse: bool,
    _exclusive: bool,
    _compensated: bool,
    dtype: torch.dtype | None,
    _backend: str,
) -> Tensor:
    return torch.empty_like(x, dtype=dtype or sum_dtype(x.dtype))


# --- other associative operations -----------------------------------------------------------


def _fold(x: Tensor, op: str, dim: int, reverse: bool, backend: str) -> Tensor:
    """Return the scan of `x` with `op`, in x's type."""
    y = torch.empty_like(x)
    options = {"op": op, "exclusive": False, "compensated": False}
    _run("fold", backend, [x], [y], dim, reverse=reverse, **options)
    return y


def _fold_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x, output)


def _fold_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    op, dim, reverse, backend = ctx.options
    return _FOLD_GRADIENTS[op](grad, x, y, dim, reverse, backend), None, None, None, None


def _add_gradient(
    grad: Tensor, _x: Tensor, _y: Tensor, dim: int, reverse: bool, backend: str
) -> Tensor:
    back: Tensor = fold(grad, "add", dim, not reverse, backend)
    return back


def _mul_gradient(
    grad: Tensor, x: Tensor, y: Tensor, dim: int, reverse: bool, backend: str
) -> Tensor:
    """Treat a product as the recurrence y = x*y with initial state 1, which also handles zeros."""
    one = torch.ones_like(_first(x, dim, reverse))
    back: Tensor = linear_scan_gradient(grad, x, y, one, dim, reverse, backend)[0]
    return back


def _extremum_gradient(
    grad: Tensor, x: Tensor, y: Tensor, dim: int, reverse: bool, backend: str
) -> Tensor:
    """Add each result's gradient to the last element up to it that is the running extremum or NaN,
    as in torch.cummax.
    """
    reigns = (x == y) | x.isnan()
    lasts = _following((~reigns).to(grad.dtype), dim, reverse)
    gathered: Tensor = linear_scan(lasts, grad, None, dim, not reverse, backend)
    return reigns.to(grad.dtype) * gathered


def _logaddexp_gradient(
    grad: Tensor, x: Tensor, y: Tensor, dim: int, reverse: bool, backend: str
) -> Tensor:
    """Use exp(x - y) as an element's share of a later result; y grows, so no exponent exceeds 0."""
    later = _entered(y, _first(y, dim, not reverse), dim, not reverse)
    fades = torch.where(y == later, 0, y - later).exp()
    gathered: Tensor = linear_scan(fades, grad, None, dim, not reverse, backend)
    return torch.where(x == y, 0, x - y).exp() * gathered


_FOLD_GRADIENTS = {
    "add": _add_gradient,
    "mul": _mul_gradient,
    "max": _extremum_gradient,
    "min": _extremum_gradient,
    "logaddexp": _logaddexp_gradient,
}


def _fold_vmap(
    _info: Any, in_dims: tuple[Any, ...], x: Tensor, op: str, dim: int, *rest: Any
) -> Any:
    return fold(x.movedim(in_dims[0], 0), op, dim + 1, *rest), 0


fold = Operator(
    custom_op("storm_kernels::fold", _fold, mutates_args=()),
    _fold,
    _fold_setup,
    _fold_backward,
    _fold_vmap,
)


@fold.op.register_fake
def _(x: Tensor, _op: str, _dim: int, _reverse: bool, _backend: str) -> Tensor:
    return torch.empty_like(x)


# --- h = a*h + b ----------------------------------------------------------------------------


def _linear_scan(
    a: Tensor, b: Tensor, initial: Tensor | None, dim: int, reverse: bool, backend: str
) -> Tensor:
    """Return h_t = a_t h_(t-1) + b_t; a and b have one shape, and one type with `initial`."""
    h = torch.empty_like(b)
    _run("linear", backend, [a, b, initial], [h], dim, reverse=reverse)
    return h


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, initial, *ctx.options = inputs
    ctx.save_for_backward(a, output, initial)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, h, initial = ctx.saved_tensors
    dim, reverse, backend = ctx.options
    da, db = linear_scan_gradient(grad, a, h, initial, dim, reverse, backend)
    first = None
    if initial is not None:
        first = _first(a, dim, reverse).conj() * _first(db, dim, reverse)
    return da, db, first, None, None, None


def _linear_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    dim: int,
    *rest: Any,
) -> Any:
    a, b, initial = (
        _batched(one, at, info.batch_size)
        for one, at in zip((a, b, initial), in_dims, strict=False)
    )
    return linear_scan(a, b, initial, dim + 1, *rest), 0


linear_scan = Operator(
    custom_op("storm_kernels::linear_scan", _linear_scan, mutates_args=()),
    _linear_scan,
    _linear_setup,
    _linear_backward,
    _linear_vmap,
)


@linear_scan.op.register_fake
def _(
    _a: Tensor, b: Tensor, _initial: Tensor | None, _dim: int, _reverse: bool, _backend: str
) -> Tensor:
    return torch.empty_like(b)


def _linear_scan_gradient(
    grad: Tensor,
    a: Tensor,
    h: Tensor,
    initial: Tensor | None,
    dim: int,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of linear_scan's a and b, in one pass over `grad`, `a` and its `h`."""
    da, db = torch.empty_like(h), torch.empty_like(h)
    _run("linear_gradient", backend, [grad, a, h, initial], [da, db], dim, reverse=reverse)
    return da, db


def _gradient_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, a, h, initial, *ctx.options = inputs
    ctx.save_for_backward(a, h, initial, output[1])


def _gradient_backward(ctx: Any, over_da: Tensor, over_db: Tensor) -> tuple[Tensor | None, ...]:
    """With s_t = db_t: s_t = g_t + a_(t+1) s_(t+1) and da_t = s_t h_(t-1), without conjugates.

    The direct gradient of s is over_db + over_da h_(t-1). To backpropagate it through the
    recurrence of s is a forward linear scan with the same a; its result is the gradient of g.
    """
    a, h, initial, s = ctx.saved_tensors
    dim, reverse, backend = ctx.options
    flows = over_db + over_da * _entered(h, initial, dim, reverse)
    to_grad = linear_scan(a, flows, None, dim, reverse, backend)
    to_a = _entered(to_grad, None, dim, reverse).conj() * s
    to_entered = over_da.conj() * s
    to_h = _following(to_entered, dim, reverse)
    to_initial = None if initial is None else _first(to_entered, dim, reverse)
    return to_grad, to_a, to_h, to_initial, None, None, None


def _gradient_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad: Tensor,
    a: Tensor,
    h: Tensor,
    initial: Tensor | None,
    dim: int,
    *rest: Any,
) -> Any:
    grad, a, h, initial = (
        _batched(one, at, info.batch_size)
        for one, at in zip((grad, a, h, initial), in_dims, strict=False)
    )
    return linear_scan_gradient(grad, a, h, initial, dim + 1, *rest), (0, 0)


linear_scan_gradient = Operator(
    custom_op("storm_kernels::linear_scan_gradient", _linear_scan_gradient, mutates_args=()),
    _linear_scan_gradient,
    _gradient_setup,
    _gradient_backward,
    _gradient_vmap,
)


@linear_scan_gradient.op.register_fake
def _(
    _grad: Tensor,
    _a: Tensor,
    h: Tensor,
    _initial: Tensor | None,
    _dim: int,
    _reverse: bool,
    _backend: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), torch.empty_like(h)


# --- shared ---------------------------------------------------------------------------------


def _batched(tensor: Any, at: int | None, size: int) -> Any:
    if tensor is None:
        return None
    return tensor.movedim(at, 0) if at is not None else tensor.expand(size, *tensor.shape)


def _first(tensor: Tensor, dim: int, reverse: bool) -> Tensor:
    """Return the first element in scan order, or zeros if there is none."""
    if tensor.shape[dim] == 0:
        return tensor.sum(dim)
    return tensor.select(dim, tensor.shape[dim] - 1 if reverse else 0)


def _entered(h: Tensor, initial: Tensor | None, dim: int, reverse: bool) -> Tensor:
    """Return the state before each element: h shifted by one, after `initial` (or zero)."""
    length = h.shape[dim]
    if length == 0:
        return h
    before = torch.zeros_like(h.select(dim, 0)) if initial is None else initial
    if reverse:
        return torch.cat([h.narrow(dim, 1, length - 1), before.unsqueeze(dim)], dim)
    return torch.cat([before.unsqueeze(dim), h.narrow(dim, 0, length - 1)], dim)


def _following(x: Tensor, dim: int, reverse: bool) -> Tensor:
    """Return the element after each one in scan order, and zero after the last."""
    return _entered(x, None, dim, not reverse)


for _device in ("cpu", "cuda"):
    for _operator in (cumsum, fold, linear_scan, linear_scan_gradient):
        _operator.op.register_autocast(_device, torch.float32)
