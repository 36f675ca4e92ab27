"""Rounding to ternary values with a gradient: the straight-through estimator.

Values are rounded in the forward pass; the backward pass treats the rounding as the identity
(Bengio, Leonard, Courville: "Estimating or Propagating Gradients Through Stochastic Neurons for
Conditional Computation", 2013).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ..api import decode, encode

__all__ = ["HALF", "TernaryProduct", "rounded_rows", "rounded_signs"]

HALF: Final = 0.5
"""Threshold as a share of the mean absolute value: larger values round to -1 or 1."""


def rounded_rows(values: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Return signs as int8, (rows, columns), and the scale of each row or group, (rows, groups).

    The threshold is half the mean absolute value of the whole tensor. A scale is the mean absolute
    value of the values beyond it. `TernaryTensor.from_float` computes both.
    """
    from ..tensor import TernaryTensor

    tensor = TernaryTensor.from_float(values.detach(), group=group)
    assert tensor.scale is not None
    return tensor.decode(), tensor.scale


def rounded_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's signs of values beyond half its mean size, and their mean size, (rows, 1).

    The size of a value is its absolute value.
    """
    sizes = x.detach().abs().float()
    beyond = sizes > HALF * sizes.mean(-1, keepdim=True)
    signs = torch.where(beyond, x.detach().sign(), 0.0).to(torch.int8)
    scale = (sizes * beyond).sum(-1, keepdim=True) / beyond.sum(-1, keepdim=True).clamp(min=1)
    return signs, scale


class TernaryProduct(torch.autograd.Function):
    """x @ w.T with both rounded to ternary; saves two bits per value of x for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: int | None) -> Tensor:
        """Return the product of x (rows, columns) and weight (outputs, columns), in x's dtype."""
        signs, x_scale = rounded_signs(x)
        w_signs, w_scale = rounded_rows(weight, group)
        w = _scaled(w_signs, w_scale, group).to(x.dtype)
        # Cloned to torch's memory: memory shared with NumPy may change unseen, so offload skips it.
        bit0, bit1 = (plane.clone() for plane in encode(signs))
        ctx.save_for_backward(bit0, bit1, x_scale, weight)
        ctx.group = group
        return (signs.to(x.dtype) @ w.T) * x_scale.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and of the latent weight, as without rounding."""
        (gradient,) = gradients
        bit0, bit1, x_scale, weight = ctx.saved_tensors
        w = _scaled(*rounded_rows(weight, ctx.group), ctx.group).to(gradient.dtype)
        shape = (gradient.shape[0], weight.shape[1])
        x = decode(bit0, bit1, shape).to(gradient.dtype) * x_scale.to(gradient.dtype)
        return gradient @ w, (gradient.T @ x).to(weight.dtype), None


def _scaled(signs: Tensor, scale: Tensor, group: int | None) -> Tensor:
    columns = signs.shape[1]
    return signs.float() * scale.repeat_interleave(group or max(1, columns), 1)[:, :columns]
