"""What scans are, in a few lines of PyTorch each: float64 loops that tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def running(op: str, x: Tensor, dim: int, reverse: bool = False, exclusive: bool = False) -> Tensor:
    """Return the running results of `op` in float64 (int64 for integers)."""
    x = x.double() if x.dtype.is_floating_point else x.long()
    if reverse:
        return running(op, x.flip(dim), dim, exclusive=exclusive).flip(dim)
    if exclusive:
        assert op == "add"
        return running(op, x, dim) - x
    scans = {
        "add": lambda: x.cumsum(dim),
        "mul": lambda: x.cumprod(dim),
        "max": lambda: x.cummax(dim).values if x.shape[dim] else x,
        "min": lambda: x.cummin(dim).values if x.shape[dim] else x,
        "logaddexp": lambda: x.logcumsumexp(dim),
    }
    return scans[op]()


def recurrence(
    a: Tensor, b: Tensor, initial: Tensor | None = None, dim: int = 1, reverse: bool = False
) -> Tensor:
    """Return h_t = a_t h_(t-1) + b_t, differentiable, in a's and b's own type."""
    a, b = torch.broadcast_tensors(a, b)
    state = torch.zeros_like(b.select(dim, 0)) if initial is None else initial
    steps = range(b.shape[dim])
    results = []
    for t in reversed(steps) if reverse else steps:
        state = a.select(dim, t) * state + b.select(dim, t)
        results.append(state)
    return torch.stack(results[::-1] if reverse else results, dim)
