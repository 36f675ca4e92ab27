"""Makes generated code give results the strides that were recorded.

A compiler replaces in-place operations and decomposes others. The replacements may give results
other strides: dropout of a transposed tensor does. Later operations were recorded for the strides
of PyTorch's own kernels. Their views are legal only for these strides, and the next graph is
compiled for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode

from storm_client.compile.schemas import written

__all__ = ["with_recorded_strides"]


def with_recorded_strides(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph for AOTAutograd to trace, in which each result has its recorded strides."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        if target._schema.is_mutable:
            copy.args, copy.target = (target, *copy.args), _written
        elif all(one.alias_info is None for one in target._schema.returns):
            strides = _strides_of(node.meta.get("val"))
            copy.args, copy.target = (target, strides, *copy.args), _made
    return fx.GraphModule(torch.nn.Module(), graph)


def _strides_of(value: object) -> Any:
    """Return the strides of a tensor, or of several; None for tensors that are not dense."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_strides_of, value))
    if not isinstance(value, torch.Tensor) or not is_non_overlapping_and_dense_or_false(value):
        return None
    return value.stride()


# --- what AOTAutograd traces ----------------------------------------------------------------------


def _made(operation: Any, strides: Any, /, *arguments: Any, **options: Any) -> Any:
    """Run an operation, and return its results with the given strides."""
    return _in_strides(operation(*arguments, **options), strides)


def _in_strides(value: Any, strides: Any) -> Any:
    if strides is None:
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(map(_in_strides, value, strides))
    return value if _has(value, strides) else _laid_out(value, strides)


def _written(operation: Any, /, *arguments: Any, **options: Any) -> Any:
    """Run an in-place operation such that the tensors that it writes to keep their strides.

    AOTAutograd does not write in place, but puts another tensor behind the one that is written to.
    """
    if operation is _BERNOULLI and arguments[0].is_cpu and len(arguments) == 2 and not options:
        return _drawn(*arguments)
    made = operation(*arguments, **options)
    for one in written(operation, arguments, options):
        if isinstance(one, FunctionalTensor) and is_non_overlapping_and_dense_or_false(one):
            _keep_strides(one)
    return made


_BERNOULLI = torch.ops.aten.bernoulli_.float


def _drawn(tensor: torch.Tensor, chance: float) -> torch.Tensor:
    """Draw by operations that Inductor generates code for, on a CPU too.

    For `bernoulli_` on a CPU, Inductor would call PyTorch's kernel. It orders such kernels only by
    data dependences, so a store could make two dropouts get each other's numbers.
    """
    return tensor.copy_(torch.rand_like(tensor, dtype=torch.float32) < chance)


def _keep_strides(tensor: FunctionalTensor) -> None:
    with disable_functional_mode():
        behind, strides = tensor.from_functional(), tensor.stride()
        if not _has(behind, strides):
            tensor.replace_(_laid_out(behind, strides))
            tensor.commit_update()
            tensor.sync()


def _has(value: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides; a dimension of size 1 may have any stride."""
    found = zip(value.shape, value.stride(), strides, strict=True)
    return value.numel() == 0 or all(size == 1 or one == other for size, one, other in found)


def _laid_out(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy of a tensor with dense strides, which a compiler fuses with other code."""
    order = sorted(range(value.dim()), key=lambda at: -strides[at])
    back = sorted(range(value.dim()), key=order.__getitem__)
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
