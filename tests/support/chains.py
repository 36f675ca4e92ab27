"""A chain of operations that saves a tensor each, all of one size, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["chain", "gradient", "leaf"]


def chain(x: Tensor, length: int = 6) -> Tensor:
    h = x * 1
    for _ in range(length):
        h = (h.cos() * 1.5).tanh()
    return h.sum()


def leaf(mib: int = 1) -> Tensor:
    return torch.randn(mib << 18, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, x)
    return found
