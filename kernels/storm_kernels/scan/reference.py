"""Scans in NumPy: the reference that tests compare the other backends with, and the last fallback.

Each function follows the definition, one step of the sequence after the other. It computes float64
and float32 in float64, half-precision types in float32, complex types in complex128 and integers in
int64. Functions take torch tensors on any device; they fill `y`, `h`, `da` and `db` in place,
whatever their strides.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["fold", "linear", "linear_gradient"]

_STEPS: dict[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "logaddexp": np.logaddexp,
}
_NEUTRAL = {"add": 0, "mul": 1, "max": -np.inf, "min": np.inf, "logaddexp": -np.inf}


def fold(
    x: torch.Tensor,
    y: torch.Tensor,
    dim: int,
    *,
    op: str,
    reverse: bool,
    exclusive: bool,
    compensated: bool,
) -> None:
    """Convert `x` to y's type and write its scan with `op` along `dim` to `y`."""
    values = _sequence(x.to(y.dtype), dim, reverse)
    with np.errstate(all="ignore"):
        add_up = _neumaier if compensated else partial(_STEPS[op].accumulate, axis=0)
        results = add_up(values)
    if exclusive and len(values):
        first = np.full_like(results[:1], _neutral(op, results.dtype))
        results = np.concatenate([first, results[:-1]])
    _write(y, results, dim, reverse)


def linear(
    a: torch.Tensor,
    b: torch.Tensor,
    initial: torch.Tensor | None,
    h: torch.Tensor,
    dim: int,
    *,
    reverse: bool,
) -> None:
    """Write h_t = a_t h_(t-1) + b_t along `dim` to `h`."""
    factors, terms = (_sequence(one, dim, reverse) for one in (a, b))
    results = np.empty_like(terms)
    with np.errstate(all="ignore"):
        state = _state(initial, terms)
        for step, (factor, term) in enumerate(zip(factors, terms, strict=True)):
            state = results[step] = factor * state + term
    _write(h, results, dim, reverse)


def linear_gradient(
    g: torch.Tensor,
    a: torch.Tensor,
    h: torch.Tensor,
    initial: torch.Tensor | None,
    da: torch.Tensor,
    db: torch.Tensor,
    dim: int,
    *,
    reverse: bool,
) -> None:
    """Write the gradients of `linear`'s a and b, given the gradient `g` of its result `h`."""
    grads, factors, results = (_sequence(one, dim, reverse) for one in (g, a, h))
    terms, scaled = np.empty_like(grads), np.empty_like(grads)
    state = np.zeros_like(grads[0]) if len(grads) else None
    entered = _state(initial, results)
    with np.errstate(all="ignore"):
        for step in range(len(grads) - 1, -1, -1):
            if step + 1 < len(grads):
                state = np.conj(factors[step + 1]) * state + grads[step]
            else:
                state = grads[step]
            terms[step] = state
            scaled[step] = state * np.conj(results[step - 1] if step else entered)
    _write(db, terms, dim, reverse)
    _write(da, scaled, dim, reverse)


def _neumaier(values: NDArray[Any]) -> NDArray[Any]:
    """Return running sums that also accumulate the rounding error of each addition."""
    results = np.empty_like(values)
    total, lost = np.zeros_like(values[:1]), np.zeros_like(values[:1])
    for step in range(len(values)):
        value = values[step : step + 1]
        after = total + value
        larger = np.abs(total) >= np.abs(value)
        error = np.where(larger, (total - after) + value, (value - after) + total)
        lost = np.where(np.isfinite(after), lost + error, 0)
        total = after
        results[step] = (total + lost)[0]
    return results


def _sequence(tensor: torch.Tensor, dim: int, reverse: bool) -> NDArray[Any]:
    """Return the tensor as an array to be scanned forwards along its first axis."""
    host = tensor.detach().cpu().resolve_conj().movedim(dim, 0)
    host = host.flip(0) if reverse else host
    if host.dtype in (torch.float16, torch.bfloat16):
        host = host.float()
    elif host.dtype == torch.float32:
        host = host.double()
    elif host.dtype.is_complex:
        host = host.to(torch.complex128)
    elif not host.dtype.is_floating_point:
        host = host.long()
    array: NDArray[Any] = host.numpy()
    return array


def _state(initial: torch.Tensor | None, like: NDArray[Any]) -> NDArray[Any]:
    if initial is None:
        return np.zeros(like.shape[1:], like.dtype)
    wide = torch.promote_types(initial.dtype, torch.float32)  # NumPy has no bfloat16
    array: NDArray[Any] = initial.detach().cpu().resolve_conj().to(wide).numpy()
    return array.astype(like.dtype)


def _neutral(op: str, dtype: np.dtype[Any]) -> float:
    value = _NEUTRAL[op]
    if np.issubdtype(dtype, np.integer) and not np.isfinite(value):
        limits = np.iinfo(dtype)
        return limits.min if value < 0 else limits.max
    return value


def _write(target: torch.Tensor, results: NDArray[Any], dim: int, reverse: bool) -> None:
    values = torch.from_numpy(np.ascontiguousarray(results))
    values = values.flip(0) if reverse else values
    target.copy_(values.movedim(0, dim))
