"""Which operations give the same bits wherever they run, by who generates the code.

PyTorch's own kernels do where they are deterministic. Generated code fuses operations, and rounds
otherwise where others stand beside them.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from storm_client.compile.views import is_view

__all__ = ["MOVES", "exact_in_eager", "exact_in_generated_code", "is_conversion"]

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


def exact_in_generated_code(node: fx.Node) -> bool:
    """Tell whether generated code gives the same bits of an operation wherever it is fused."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    if is_conversion(node):
        return _widens(node)
    return target.overloadpacket in MOVES or is_view(target)


def exact_in_eager(node: fx.Node) -> bool:
    """Tell whether PyTorch's own kernels give the same bits of an operation each time."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    random = {torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise}
    known = target.namespace in ("aten", "prims")
    return known and not target._schema.is_mutable and not random.intersection(target.tags)


def is_conversion(node: fx.Node) -> bool:
    """Tell whether an operation gives its argument another type."""
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
