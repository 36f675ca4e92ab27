"""The values that a forward graph saves: which of them may be offloaded, and which nodes use them.

A value is not offloaded where a compiler could run an operation in place in its memory. Inputs that
the graph modifies are saved with their new content.
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

__all__ = ["Rules", "SavedValues", "uses"]

aten = torch.ops.aten

_WRITTEN_IN_PLACE = {
    aten.index_put,
    aten._unsafe_index_put,
    aten.slice_scatter,
    aten.select_scatter,
    aten.as_strided_scatter,
    aten.diagonal_scatter,
}
"""Operations that a compiler runs in the memory of their first argument if nothing reads it
later."""

_READING = {"flex_attention", "flex_attention_backward"}
"""Higher-order operators that write to none of their arguments; others may."""


def _never(_: fx.Node) -> bool:
    return False


class Rules(NamedTuple):
    """The user's options, and the properties of the code generator."""

    min_bytes: int
    codec: str
    is_exact: Callable[[fx.Node], bool]
    """Whether an operation gives the same bits wherever it runs."""
    is_fused: bool = False
    """Whether generated code fuses operations. If so:"""
    runs_alone: Callable[[fx.Node], bool] = _never
    """Whether an operation is not fused, and reads its inputs from memory."""
    rounds_alike: Callable[[fx.Node], bool] = _never
    """Whether a fused operation gives the same bits if its inputs have the same bits."""


class SavedValues:
    """The values that a forward graph saves for its backward graph, before both are changed."""

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        outputs: int,
        static: list[int],
        rules: Rules,
    ) -> None:
        """Find the saved values: the forward graph's results after the first `outputs`."""
        self.rules = rules
        (output,) = forward.graph.find_nodes(op="output")
        results = list(output.args[0])
        self.saved = results[outputs:]
        self.placeholders: dict[str, fx.Node] = {
            n.name: n for n in backward.graph.find_nodes(op="placeholder")
        }
        inputs = forward.graph.find_nodes(op="placeholder")
        primals = [node for node in inputs if str(node.target).startswith("primals")]
        self.changed = _changed(inputs, output)
        """Inputs whose content has changed when the backward graph begins."""
        self.static = {primals[index] for index in static if index < len(primals)} - self.changed
        """Inputs that live longer than the graphs."""
        self.returned = {memory_of(n) for n in results[:outputs] if isinstance(n, fx.Node)}
        """Memory of the results that the caller gets, and may modify. PyTorch has saved them, and
        raises then."""
        self.visible_outside = self.returned | set(inputs)
        self.returns_a_loss = any(
            is_tensor(n) and n.meta["val"].dim() == 0 and n.meta["val"].is_floating_point()
            for n in results[:outputs]
        )
        self.symbols = symbols_of(backward.graph)

    def tensors(self) -> set[fx.Node]:
        """Return the tensors that take memory for being saved."""
        return {
            node
            for node in self.saved
            if is_tensor(node)
            and node.name in self.placeholders
            and memory_of(node) not in self.static
        }

    def is_large(self, node: fx.Node) -> bool:
        """Return whether a value has enough bytes to be offloaded."""
        return nbytes_of(node.meta["val"]) >= max(self.rules.min_bytes, 1)

    def is_offloadable(self, node: fx.Node) -> bool:
        """Return whether a saved value may be offloaded, and restored later in other memory."""
        return self.is_large(node) and self.can_be_offloaded(
            node, uses(self.placeholders[node.name])
        )

    def has_known_sizes(self, node: fx.Node) -> bool:
        """Return whether the backward graph can compute a value's shape and strides."""
        value = node.meta["val"]
        return can_compute([*value.shape, *value.stride()], self.symbols)

    def can_be_offloaded(self, made: fx.Node, uses_there: list[fx.Node]) -> bool:
        """Return whether a value need not be in memory until the nodes `uses_there` use it."""
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
    """Return the inputs that a forward graph modifies, or that are modified when it has run."""
    returned = output.meta.get("desc") or ()
    later = [one.mutated_input for one in returned if isinstance(one, InputMutationAOTOutput)]
    return {n for n in inputs if n.meta.get("desc") in later or any(map(_is_mutable, uses(n)))}


def _is_mutable(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _writes(node: fx.Node) -> bool:
    """Return whether a node may write to its arguments, or a compiler may make it do so."""
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
