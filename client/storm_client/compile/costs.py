"""What the nodes of a graph probably take: for when a fetch begins, never for what it returns.

An operation takes as long as its arithmetic or as its memory traffic, whichever is longer. Where
operations are fused, what one hands to the next is no traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from storm_client.planner.machine import Machine

__all__ = ["is_product", "nbytes_of", "seconds_of"]

aten = torch.ops.aten

PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
"""Products of matrices."""

ATTENTION = {
    aten._scaled_dot_product_cudnn_attention: (1, 1),
    aten._scaled_dot_product_efficient_attention: (1, 1),
    aten._scaled_dot_product_flash_attention: (1, 1),
    aten._scaled_dot_product_flash_attention_for_cpu: (1, 1),
    aten._scaled_dot_product_cudnn_attention_backward: (3, 2),
    aten._scaled_dot_product_efficient_attention_backward: (3, 2),
    aten._scaled_dot_product_flash_attention_backward: (3, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (3, 2),
}
"""How many products each has over the width of a head of the keys, and of the values."""


def nbytes_of(value: object) -> int:
    """Return the bytes of a traced tensor or of several, by the sizes seen when it was traced."""
    if isinstance(value, (tuple, list)):
        return sum(map(nbytes_of, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return _hint(value.numel()) * value.element_size()


def is_product(node: fx.Node) -> bool:
    """Tell whether a node is a product of matrices."""
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.overloadpacket in PRODUCTS
    )


def seconds_of(node: fx.Node, machine: Machine, *, is_fused: bool = False) -> float:
    """Return what a node takes: nothing for views, placeholders and outputs.

    Where code is generated for operations that are fused, `is_fused`, only what comes from others
    or goes to them is traffic.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    if any(one.alias_info is not None for one in node.target._schema.returns):
        return 0.0
    flops = _flops(node)
    is_fused = is_fused and not flops
    traffic = 0
    if not (is_fused and all(map(_can_be_fused, _beyond_views(node.users)))):
        traffic += nbytes_of(node.meta.get("val"))
    traffic += sum(
        nbytes_of(source.meta.get("val"))
        for source in node.all_input_nodes
        if not (is_fused and _can_be_fused(source))
    )
    return max(traffic / machine.bandwidth, flops / _rate(node, machine))


def _beyond_views(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        if _is_view(node):
            yield from _beyond_views(node.users)
        else:
            yield node


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and any(
        one.alias_info is not None for one in node.target._schema.returns
    )


def _can_be_fused(node: fx.Node) -> bool:
    """Tell whether generated code may run a node in one kernel with its neighbours."""
    while _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    packet = target.overloadpacket
    return target.namespace in ("aten", "prims") and not (
        packet in flop_registry or packet in ATTENTION
    )


def _rate(node: fx.Node, machine: Machine) -> float:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(first, torch.Tensor) or first.dtype.itemsize < torch.float32.itemsize:
        return machine.half_flops
    if torch.get_float32_matmul_precision() != "highest" and first.dtype == torch.float32:
        return max(machine.single_flops, machine.rounded_share * machine.half_flops)
    return machine.single_flops


def _flops(node: fx.Node) -> float:
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target.overloadpacket in ATTENTION:
        return _attention_flops(node)
    count = flop_registry.get(node.target.overloadpacket)
    if count is None:
        return 0.0
    arguments, options = fx.map_arg((node.args, node.kwargs), _sized)
    try:
        return float(count(*arguments, **options, out_val=_sized(node)))
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0.0  # a shape that its formula does not know


def _attention_flops(node: fx.Node) -> float:
    """Count by the queries' heads, which may share keys, and half of it where nobody looks ahead.

    PyTorch's formulas know no mask, and before its version 2.13 none of shared keys.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    places = {one.name: at for at, one in enumerate(node.target._schema.arguments)}

    def given(name: str) -> Any:
        at = places[name]
        return node.args[at] if at < len(node.args) else node.kwargs.get(name)

    queries, keys, values = (given(name).meta["val"].shape for name in ("query", "key", "value"))
    over_keys, over_values = ATTENTION[node.target.overloadpacket]
    batch, heads, length, width = map(_hint, queries)
    widths = over_keys * width + over_values * _hint(values[-1])
    share = 0.5 if given("is_causal") and length > 1 else 1.0
    return share * 2.0 * batch * heads * length * _hint(keys[-2]) * widths


def _sized(node: fx.Node) -> Any:
    """Return what a node's value was, with plain numbers for sizes."""

    def sized(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(sized, value))
        if isinstance(value, torch.Tensor):
            return torch.empty([_hint(n) for n in value.shape], dtype=value.dtype, device="meta")
        return _hint(value) if isinstance(value, torch.SymInt) else value

    return sized(node.meta.get("val"))


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)
