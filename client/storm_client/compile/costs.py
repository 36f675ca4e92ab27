"""Estimated times of a graph's nodes, which decide when a fetch begins, never what it returns.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer. Values that
one fused operation passes to the next are no traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from storm_client.compile.schemas import argument
from storm_client.compile.views import hint_of, is_view, is_view_node, nbytes_of
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
"""For each, how many products run over the head width of the keys, and over that of the values."""


def is_product(node: fx.Node) -> bool:
    """Return whether a node is a product of matrices."""
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.overloadpacket in PRODUCTS
    )


def seconds_of(node: fx.Node, machine: Machine, *, is_fused: bool = False) -> float:
    """Return how many seconds a node takes: none for views, placeholders and outputs.

    With `is_fused`, generated code fuses operations. Then only values from and for operations that
    cannot be fused are traffic.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    if is_view(node.target):
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
        if is_view_node(node):
            yield from _beyond_views(node.users)
        else:
            yield node


def _can_be_fused(node: fx.Node) -> bool:
    """Return whether generated code may run a node in one kernel with its neighbours."""
    while is_view_node(node) and isinstance(node.args[0], fx.Node):
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
    """Count by the queries' heads, which may share keys; causal attention counts half.

    PyTorch's formulas know no masks, and before version 2.13 no shared keys.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    queries, keys, values = (
        argument(node, name).meta["val"].shape for name in ("query", "key", "value")
    )
    over_keys, over_values = ATTENTION[node.target.overloadpacket]
    batch, heads, length, width = map(hint_of, queries)
    widths = over_keys * width + over_values * hint_of(values[-1])
    share = 0.5 if argument(node, "is_causal") and length > 1 else 1.0
    flops: float = share * 2.0 * batch * heads * length * hint_of(keys[-2]) * widths
    return flops


def _sized(node: fx.Node) -> Any:
    """Return a node's value as traced, on the meta device and with plain numbers for sizes."""

    def sized(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(sized, value))
        if isinstance(value, torch.Tensor):
            return torch.empty([hint_of(n) for n in value.shape], dtype=value.dtype, device="meta")
        return hint_of(value) if isinstance(value, torch.SymInt) else value

    return sized(node.meta.get("val"))
