"""What the nodes of a graph probably take: for when a fetch begins, never for what it returns.

An operation takes as long as its arithmetic or as its memory traffic, whichever is longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from storm_client.plan.planner import CPU_COSTS, CUDA_COSTS, Costs

__all__ = ["Machine", "machine_of", "nbytes_of", "seconds_of"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one kind of device."""

    flops: float
    """Multiplications and additions a second, in the dtype of most products."""
    bandwidth: float
    """Bytes of memory traffic a second."""
    costs: Costs


CUDA = Machine(flops=4e14, bandwidth=3e12, costs=CUDA_COSTS)
CPU = Machine(flops=5e10, bandwidth=1e10, costs=CPU_COSTS)


def machine_of(device: torch.device) -> Machine:
    """Return the rates for tensors of `device`."""
    return CUDA if device.type == "cuda" else CPU


def nbytes_of(value: object) -> int:
    """Return the bytes of a traced tensor or of several, by the sizes seen when it was traced."""
    if isinstance(value, (tuple, list)):
        return sum(map(nbytes_of, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return _hint(value.numel()) * value.element_size()


def seconds_of(node: fx.Node, machine: Machine) -> float:
    """Return what a node takes: nothing for views, placeholders and outputs."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    if any(one.alias_info is not None for one in node.target._schema.returns):
        return 0.0
    traffic = nbytes_of(node.meta.get("val"))
    traffic += sum(nbytes_of(source.meta.get("val")) for source in node.all_input_nodes)
    return max(traffic / machine.bandwidth, _flops(node) / machine.flops)


def _flops(node: fx.Node) -> float:
    assert isinstance(node.target, torch._ops.OpOverload)
    count = flop_registry.get(node.target.overloadpacket)
    if count is None:
        return 0.0
    arguments, options = fx.map_arg((node.args, node.kwargs), _sized)
    try:
        return float(count(*arguments, **options, out_val=_sized(node)))
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0.0  # a shape that its formula does not know


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
