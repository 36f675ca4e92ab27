"""Products that autograd knows: what a backward pass needs of them is kept encoded.

A gated product keeps its input and the blobs of gate and up. Gate and up themselves, the
activation and their product are never in memory once the forward pass has passed them: the
backward pass decodes and computes them in one kernel.
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
    """The windows of a layer's last call, for its next: what is known before there is a result."""

    def __init__(self) -> None:
        self._windows: tuple[Window, ...] | None = None

    def windows(self, x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Window, ...]:
        """Return windows for the products, from a sample of them where none are known."""
        if self._windows is None:
            self._windows = hopper.windows(x, weights)
        return self._windows

    def learn(self, sizes: list[tuple[int, bool]], dtype: torch.dtype, elements: int) -> None:
        """Forget the windows where a blob did not fit, or nearly did not."""
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
    """Return h = activation(x @ gate.T) * (x @ up.T), or h @ down.T where there is a `down`.

    What `hopper.takes` refuses is not for it. Differentiable once.
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

    One that did not fit its memory is made again, from the same product with the same bits, in as
    much as any blob takes.
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
