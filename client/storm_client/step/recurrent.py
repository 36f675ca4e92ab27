"""Runs LSTMs on a CPU as with gradients recorded, in runs that record none.

oneDNN's layer checks, below autograd, whether gradients are recorded. If so, it rounds differently
and makes a workspace for its backward pass. Only oneDNN knows the workspace's size, so it is
measured at the capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from storm_client.errors import StormError

__all__ = ["BACKWARD_LAYER", "LAYER", "TRAINED_LAYER", "in_single_precision", "workspace_bytes"]

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
BACKWARD_LAYER = torch.ops.aten.mkldnn_rnn_layer_backward.default
"""It writes to the workspace, its last argument, which its schema does not declare."""

_LIBRARY = torch.library.Library("stormd", "FRAGMENT")  # type: ignore[no-untyped-call]

_LIBRARY.define(  # type: ignore[no-untyped-call]
    "trained_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, "
    "Tensor hx, Tensor cx, bool reverse, int[] batch_sizes, int mode, int hidden_size, "
    "int num_layers, bool has_biases, bool bidirectional, bool batch_first, bool train, "
    "int workspace_bytes) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_exact_strides,),
)

TRAINED_LAYER = torch.ops.stormd.trained_layer.default
"""`LAYER` where gradients are recorded; its last argument is the size of the workspace."""


def workspace_bytes(arguments: tuple[Any, ...]) -> int:
    """Return the workspace's bytes for tensors like `arguments`, by running the layer on zeros."""
    with torch.utils._python_dispatch._disable_current_modes():
        zeros = pytree.tree_map_only(torch.Tensor, _zeros, arguments)
        return _run(zeros)[3].nbytes


def in_single_precision(made: Any) -> Any:
    """Return the layer's gradients as oneDNN makes them: PyTorch 2.11 says that they are halves."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda one: one.new_empty_strided(one.shape, one.stride(), dtype=torch.float32),
        made,
    )


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def _run(arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        made: tuple[torch.Tensor, ...] = LAYER(*arguments)
        return made


def _trained_layer(*arguments: Any) -> tuple[torch.Tensor, ...]:
    made = _run(arguments[:-1])
    if made[3].nbytes != arguments[-1]:
        raise StormError(
            f"oneDNN's LSTM makes a workspace of {made[3].nbytes} bytes, and made one of "
            f"{arguments[-1]} when the step was captured; call storm.compile_step again"
        )
    return made


def _fake_layer(*arguments: Any) -> tuple[torch.Tensor, ...]:
    output, hidden, cell, _ = LAYER(*arguments[:-1])
    return output, hidden, cell, output.new_empty(arguments[-1], dtype=torch.uint8)


_LIBRARY.impl("trained_layer", _trained_layer, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("stormd::trained_layer", _fake_layer, lib=_LIBRARY)
