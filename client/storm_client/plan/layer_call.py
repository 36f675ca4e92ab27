"""A call of a layer by which what it saves is made again where the backward pass asks for it.

Autograd holds numbers in the place of what is saved, so the graph is the one that it would be
otherwise. The first number that the backward pass asks for has the forward called again, for what
all of them stand for; each is given away once, and freed with its use. What the layer was given is
saved as by any operation.

PyTorch's own checkpointing does the same for any function, and takes the thread as long as the
forward pass itself where operations are small. Here the layer has been tried: it does the same
twice where nothing that it reads has changed, and that is looked at before it is called again.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final, Never

import torch
from torch.autograd.graph import saved_tensors_hooks

from storm_client.blocks import Stacks
from storm_client.plan.layer_state import Arguments, Call, CallState

__all__ = ["HookedCall"]


class HookedCall:
    """A call in the forward pass, and those that follow from it in backward passes."""

    def __init__(self, call: Call) -> None:
        """Be a call."""
        self._state, self._forward, self._stats = call
        self._saved: list[tuple[torch.dtype, torch.Size]] = []
        self._made: list[torch.Tensor | None] = []
        """What the numbers stand for, without what was given away; empty before it was made."""

    def __call__(self, arguments: Arguments) -> Any:
        """Return what the forward returns."""
        args, kwargs = arguments
        self._given: torch.Tensor = _Given.apply(_RECORDED, *CallState.saved_of(args))  # type: ignore[no-untyped-call]
        """Whose node has saved them, by the hooks that are on PyTorch's stack now."""
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._forward(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> int:
        self._saved.append((tensor.dtype, tensor.shape))
        return len(self._saved) - 1

    def _unpack(self, number: int) -> torch.Tensor:
        """Return what a number stands for, having all made again unless that is here."""
        tensor = self._made[number] if self._made else None
        if tensor is None:
            stacks = Stacks()
            try:
                self._made = self._make_again()
            except BaseException:
                stacks.restore()
                raise
            tensor = self._made[number]
            assert tensor is not None, "made by one thread, and asked for by others"
        self._made[number] = None
        return tensor

    def _make_again(self) -> list[torch.Tensor | None]:
        """Return what the forward saves when it is called again.

        Raises:
            ActivationLost: what it reads is not as it was in the forward pass, or it saves other
                tensors.
        """
        self._state.check()
        began = perf_counter()
        node: Any = self._given.grad_fn
        args, kwargs = self._state.arguments(self._state.given(node.saved_tensors), {})
        made: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> None:
            made.append(tensor.detach())

        try:
            with self._state.surroundings(), saved_tensors_hooks(pack, _never):
                self._forward(*args, **kwargs)  # to its end: some fill what they have saved before
        finally:
            self._stats.replayed(perf_counter() - began)
        if [(tensor.dtype, tensor.shape) for tensor in made] != self._saved:
            raise self._state.did_otherwise(
                f"it saved {_listed(made)} instead of {len(self._saved)} tensors of certain shapes"
            )
        return list(made)


class _Given(torch.autograd.Function):
    """An operation that does nothing, and saves what it is given."""

    @staticmethod
    def forward(ctx: Any, recorded: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return recorded.detach()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Never:  # noqa: ARG004 - so it is called
        raise AssertionError("nobody has its result")


_RECORDED: Final = torch.empty(0, device="cpu", requires_grad=True)
"""Has operations be recorded of which nothing else needs a gradient."""


def _never(_: object) -> Never:
    raise AssertionError("nobody goes back through a call that is made again")


def _listed(tensors: Sequence[torch.Tensor]) -> str:
    """Return some of the shapes of tensors."""
    shown = ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
    return f"{len(tensors)} ({shown}{', ...' if len(tensors) > 4 else ''})"
