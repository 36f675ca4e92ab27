"""Which operations give the same bits wherever they run, by code generator; and which draw.

PyTorch's own kernels give the same bits where they are deterministic. Generated code fuses
operations, and rounds differently beside different operations.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from storm_client.compile.views import is_view

__all__ = [
    "MOVES",
    "draws",
    "exact_in_eager",
    "exact_in_generated_code",
    "is_conversion",
    "is_seed",
]

aten = torch.ops.aten

MOVES = {
    aten.abs,
    aten.bitwise_and,
    aten.bitwise_not,
    aten.bitwise_or,
    aten.cat,
    aten.clone,
    aten.constant_pad_nd,
    aten.copy,
    aten.embedding,
    aten.eq,
    aten.expand,
    aten.flip,
    aten.full,
    aten.full_like,
    aten.gather,
    aten.ge,
    aten.gt,
    aten.index,
    aten.index_select,
    aten.le,
    aten.logical_and,
    aten.logical_not,
    aten.logical_or,
    aten.lt,
    aten.maximum,
    aten.minimum,
    aten.ne,
    aten.neg,
    aten.relu,
    aten.repeat,
    aten.roll,
    aten.scalar_tensor,
    aten.where,
}
"""Operations that move, compare or choose, and round nothing: exact wherever they are fused."""

_SEEDS = {"philox_seed", "philox_offset", "rng_state", "unused"}
"""Names of attention's random state, in its results and in its backward pass's arguments. PyTorch
has it in host or device memory, whatever a fake tensor says."""


def draws(target: torch._ops.OpOverload) -> bool:
    """Return whether an operation may draw random numbers.

    An operation that gets the random state of another recomputes the same numbers, and draws
    nothing.
    """
    is_given = any(one.name in _SEEDS for one in target._schema.arguments)
    return torch.Tag.nondeterministic_seeded in target.tags and not is_given


def is_seed(node: fx.Node) -> bool:
    """Return whether a value is the random state from which an operation has drawn."""
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    target = source.target if isinstance(source, fx.Node) else None
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(index, int):
        return False
    returns = target._schema.returns  # one of them may be a list, of any length
    return index < len(returns) and returns[index].name in _SEEDS


def exact_in_generated_code(node: fx.Node) -> bool:
    """Return whether generated code gives the same bits of an operation wherever it is fused."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    if is_conversion(node):
        return _widens(node)
    return target.overloadpacket in MOVES or is_view(target)


def exact_in_eager(node: fx.Node) -> bool:
    """Return whether PyTorch's own kernels give the same bits of an operation each time.

    Attention's backward pass may not, even where it draws nothing.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    random = {torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise}
    known = target.namespace in ("aten", "prims")
    return known and not target._schema.is_mutable and not random.intersection(target.tags)


def is_conversion(node: fx.Node) -> bool:
    """Return whether an operation converts its argument to another dtype."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket in (
        aten._to_copy,
        torch.ops.prims.convert_element_type,
    )


def _widens(node: fx.Node) -> bool:
    source, made = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    return torch.promote_types(source.dtype, made.dtype) == made.dtype
