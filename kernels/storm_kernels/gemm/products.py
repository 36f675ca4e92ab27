"""Differentiable gated products that save encoded tensors for the backward pass.

A gated product saves its input and the blobs of gate and up. It does not save gate and up
themselves, the activation or their product: the backward pass decodes and recomputes them in one
kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ..ancf.dtypes import dtype_of
from ..encoded_bytes import mark_encoded
from . import hopper
from .window import Window, geometry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Hint", "gated_layer"]


class Hint:
    """The windows of a layer's last call, which its next call uses before it has a result."""

    def __init__(self) -> None:
        self._windows: tuple[Window, ...] | None = None

    def windows(self, x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Window, ...]:
        """Return windows for the products; if none are known, compute them from a sample."""
        if self._windows is None:
            self._windows = hopper.windows(x, weights)
        return self._windows

    def learn(self, sizes: list[tuple[int, bool]], dtype: torch.dtype, elements: int) -> None:
        """Discard the windows if a blob did not fit or almost filled its buffer."""
        if self._windows is None:
            return
        kind = dtype_of(dtype)
        records = geometry(kind, elements).payload_offset
        for (nbytes, fits), window in zip(sizes, self._windows, strict=True):
            room = window.room(kind, elements)
            if not fits or nbytes - records > 0.9 * (room - records):
                self._windows = None
                return


def gated_layer(  # noqa: PLR0917 (as the Function has it)
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor | None,
    activation: str,
    hint: Hint,
) -> Tensor:
    """Return h = activation(x @ gate.T) * (x @ up.T), or h @ down.T if there is a `down`.

    x and the weights must satisfy `hopper.takes`. The result is differentiable once.
    """
    weights = (gate, up) if down is None else (gate, up, down)
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in (x, *weights)):
        h, _ = hopper.gated(x, (gate, up), activation)
        return h if down is None else torch.nn.functional.linear(h, down)
    result: Tensor = _Gated.apply(x, gate, up, down, activation, hint)  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes arguments by place)
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor | None,
        activation: str,
        hint: Hint,
    ) -> Tensor:
        first, second = hint.windows(x, (gate, up))
        h, codes = hopper.gated(x, (gate, up), activation, coded=(first, second))
        assert codes is not None
        for blob in codes.blobs:
            mark_encoded(blob)
        ctx.activation, ctx.hint = activation, hint
        ctx.windows, ctx.sizes = codes.windows, codes.sizes
        ctx.save_for_backward(x, gate, up, down, *codes.blobs)
        return h if down is None else torch.nn.functional.linear(h, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, *blobs = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_h = (rows if down is None else rows @ down).contiguous()
        windows, blobs = _complete(ctx, x, (gate, up), blobs, of_h.numel())
        bases = tuple(window.base for window in windows)
        of_gate, of_up, h = hopper.backward(of_h, tuple(blobs), bases, ctx.activation)
        needs = ctx.needs_input_grad
        flat = x.reshape(-1, x.shape[-1])
        of_x = torch.addmm(of_gate @ gate, of_up, up).view_as(x) if needs[0] else None
        return (
            of_x,
            of_gate.t() @ flat if needs[1] else None,
            of_up.t() @ flat if needs[2] else None,
            rows.t() @ h if down is not None and needs[3] else None,
            None,
            None,
        )


def _complete(
    ctx: Any, x: Tensor, weights: tuple[Tensor, Tensor], blobs: list[Tensor], elements: int
) -> tuple[tuple[Window, ...], tuple[Tensor, ...]]:
    """Return windows and blobs that hold every element.

    If a blob did not fit its buffer, both blobs are recomputed from the same product, which has the
    same bits, in buffers that any blob fits.
    """
    sizes = ctx.sizes.wait()
    ctx.hint.learn(sizes, x.dtype, elements)
    if all(fits for _, fits in sizes):
        return ctx.windows, tuple(blobs)
    first, second = hopper.windows(x, weights)
    room = hopper.full_room(x, weights[0])
    _, codes = hopper.gated(x, weights, ctx.activation, coded=(first, second), room=room)
    assert codes is not None
    return codes.windows, codes.blobs
