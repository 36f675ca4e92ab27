"""What a forward graph hands to its backward graph: which of it may leave, and who uses it.

A value that something could be written into in place of a copy stays as it is. Inputs that the
graph changes are handed over as what they have become.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor

from storm_client.compile.exactness import is_seed
from storm_client.compile.symbols import can_compute, symbols_of
from storm_client.compile.views import is_tensor, memory_of, nbytes_of, source_of

__all__ = ["Handover", "Rules", "uses"]

aten = torch.ops.aten

_WRITTEN_IN_PLACE = {
    aten.index_put,
    aten._unsafe_index_put,
    aten.slice_scatter,
    aten.select_scatter,
    aten.as_strided_scatter,
    aten.diagonal_scatter,
}
"""What a compiler runs in the memory of its first argument where nothing reads that later."""

_READING = {"flex_attention", "flex_attention_backward"}
"""Higher-order operators that write to none of their arguments; others may."""


class Rules(NamedTuple):
    """What was asked for, and what the code's generator does."""

    min_bytes: int
    codec: str
    is_exact: Callable[[fx.Node], bool]
    """Whether an operation gives the same bits wherever it runs."""
    runs_alone: Callable[[fx.Node], bool] | None = None
    """Where others are fused: whether one is not, and reads what lies in memory."""
    rounds_alike: Callable[[fx.Node], bool] | None = None
    """Whether one that is fused gives the same bits if it begins with that."""


class Handover:
    """What there is of a forward graph and its backward graph, before they are changed."""

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        outputs: int,
        static: list[int],
        rules: Rules,
    ) -> None:
        """Look at what one hands to the other, behind the forward's first `outputs` results."""
        self.rules = rules
        (output,) = forward.graph.find_nodes(op="output")
        results = list(output.args[0])
        self.handed = results[outputs:]
        self.placeholders: dict[str, fx.Node] = {
            n.name: n for n in backward.graph.find_nodes(op="placeholder")
        }
        inputs = forward.graph.find_nodes(op="placeholder")
        primals = [node for node in inputs if str(node.target).startswith("primals")]
        self.changed = _changed(inputs, output)
        """Inputs that are others when the backward graph begins."""
        self.static = {primals[index] for index in static if index < len(primals)} - self.changed
        """Inputs that live longer than the graphs."""
        self.returned = {memory_of(n) for n in results[:outputs] if isinstance(n, fx.Node)}
        """What a caller gets, and may change. PyTorch has saved it, and raises then."""
        self.seen_outside = self.returned | set(inputs)
        self.returns_a_loss = any(
            is_tensor(n) and n.meta["val"].dim() == 0 and n.meta["val"].is_floating_point()
            for n in results[:outputs]
        )
        self.symbols = symbols_of(backward.graph)

    def tensors(self) -> set[fx.Node]:
        """Return the tensors that take memory for being handed over."""
        return {
            node
            for node in self.handed
            if is_tensor(node)
            and node.name in self.placeholders
            and memory_of(node) not in self.static
        }

    def is_large(self, node: fx.Node) -> bool:
        """Tell whether a value has enough bytes to leave."""
        return nbytes_of(node.meta["val"]) >= max(self.rules.min_bytes, 1)

    def may_leave(self, node: fx.Node) -> bool:
        """Tell whether what is handed over may be given back later in other memory."""
        return self.is_large(node) and self.can_leave(node, uses(self.placeholders[node.name]))

    def has_known_sizes(self, node: fx.Node) -> bool:
        """Tell whether the backward graph can say how a value is laid out."""
        value = node.meta["val"]
        return can_compute([*value.shape, *value.stride()], self.symbols)

    def can_leave(self, made: fx.Node, uses_there: list[fx.Node]) -> bool:
        """Tell whether a value, used by some nodes there, needs not be in memory meanwhile."""
        value = made.meta["val"]
        if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_quantized:
            return False
        if value.device.type not in ("cpu", "cuda") or not is_non_overlapping_and_dense_or_false(
            value
        ):
            return False
        if not self.has_known_sizes(made) or is_seed(made):
            return False
        if any(use.op == "output" for use in uses_there):
            return False  # a gradient that is the saved tensor itself
        return not any(map(_writes, (*uses(memory_of(made)), *uses_there)))


def uses(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that use a value or a view of it."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found[user] = None
                if source_of(user) is not None:
                    waiting.append(user)
    return list(found)


def _changed(inputs: Iterable[fx.Node], output: fx.Node) -> set[fx.Node]:
    """Return which of a forward graph's inputs it changes, or has changed when it has run."""
    returned = output.meta.get("desc") or ()
    later = [one.mutated_input for one in returned if isinstance(one, InputMutationAOTOutput)]
    return {n for n in inputs if n.meta.get("desc") in later or any(map(_is_mutable, uses(n)))}


def _is_mutable(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _writes(node: fx.Node) -> bool:
    """Tell whether a node may write to what it uses, or a compiler may have it do so."""
    if node.op == "output" or node.target is operator.getitem:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return not _is_symbolic(node) and str(target) not in _READING
    if target.namespace == "_c10d_functional":
        return True
    return _is_mutable(node) or target.overloadpacket in _WRITTEN_IN_PLACE


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
