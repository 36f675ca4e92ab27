"""Gradients without a graph of their own: to differentiate one raises, whatever it is asked for.

PyTorch's `once_differentiable` connects such a gradient to nothing. A second derivative then lacks
a term, or is None, and nothing says so. Here the gradient follows, in the graph, all tensors that
it was computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["differentiable_once", "follower"]


def differentiable_once(
    gradients: Sequence[Tensor | None], *sources: Tensor | None, message: str
) -> tuple[Tensor | None, ...]:
    """Return gradients, computed from `sources`; to differentiate one raises RuntimeError."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    apply: Any = _Once.apply
    found: tuple[Tensor | None, ...] = apply(message, len(gradients), *gradients, *sources)
    return found


def follower(tensor: Tensor, message: str) -> Tensor:
    """Return a tensor without elements that follows another in the graph, and does not hold it."""
    apply: Any = _Follower.apply
    found: Tensor = apply(tensor, message)
    return found


class _Once(torch.autograd.Function):
    """The first `count` tensors; all are inputs in the graph."""

    @staticmethod
    def forward(
        ctx: Any, message: str, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.message = message
        return tuple(None if one is None else one.detach() for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(ctx.message)


class _Follower(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, message: str) -> Tensor:  # noqa: ARG004
        ctx.message = message
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(ctx.message)
