"""How a saved value is recomputed in the backward graph, with the same bits.

Only operations that give the same bits wherever they run are recomputed. For that, their inputs may
be saved, too, where they are in memory anyway; parameters always are.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from storm_client.compile.costs import is_product
from storm_client.compile.exactness import MOVES, is_conversion
from storm_client.compile.saved_values import SavedValues, uses
from storm_client.compile.views import is_tensor, memory_of, source_of

__all__ = ["Found", "Recipes", "inverse_permutation"]

LONGEST_RECIPE = 16
"""The most operations that are recomputed for one value."""

PADDED_STRIDE, PADDED_BYTES = 1024, 128
"""By default, Inductor pads strides above so many elements to multiples of so many bytes."""

aten = torch.ops.aten


class Found(NamedTuple):
    """A recipe as nodes."""

    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    """Values that are saved, or would be besides, from which the recipe starts."""
    parameters: tuple[fx.Node, ...]
    """Parameters that the recipe reads, which are in memory anyway."""


class Recipes:
    """Finds recipes for the values that a forward graph saves."""

    def __init__(self, saved_values: SavedValues) -> None:
        self.saved_values, self.rules = saved_values, saved_values.rules
        self.permuted = {
            source_of(n): n
            for n in saved_values.saved
            if is_tensor(n) and inverse_permutation(n) is not None
        }
        """Saved views with permuted dimensions, by the node that they are views of."""

    def find(self, node: fx.Node, tensors: set[fx.Node]) -> Found | None:
        """Return how a value is recomputed, and from which others; None if it cannot be."""
        if memory_of(node) in self.saved_values.returned:
            return None
        search = _Search(self, node, tensors)
        if not search.make(node):
            return None
        nodes = tuple(search.nodes)
        given = self.saved_values.placeholders[node.name]
        if not self.rules.is_exact(memory_of(node)) and not self._is_read_alone(given):
            return None
        if any(map(self.is_special, nodes)) and not _is_repeatable(node):
            return None
        return Found(nodes, tuple(search.sources), tuple(search.parameters))

    def can_be_recomputed(self, node: fx.Node) -> bool:
        """Return whether an operation gives the same bits in the backward graph."""
        return node.op == "call_function" and (
            self.rules.is_exact(node) or self._rounds_alike(node)
        )

    def is_special(self, node: fx.Node) -> bool:
        """Return whether the bits of an operation depend on where a compiler puts its result."""
        return self.rules.runs_alone(node) or self._rounds_alike(node)

    def _rounds_alike(self, node: fx.Node) -> bool:
        """Return whether generated code rounds a result of fused operations the same everywhere.

        Fused operations begin with values in memory, or with saved values in single precision,
        which are as they were in registers. A rounded value is in memory, and a value that is
        rounded on the way has no other reader. Otherwise it might be read rounded in one place, and
        not in another.
        """
        if self._converts_a_parameter(node):
            return True
        if not self.rules.rounds_alike(node) or not is_tensor(node):
            return False
        if not _is_single(node) and len(node.users) != 1 and not self._is_read_alone(node):
            return False
        return all(map(self._is_known_to_the_bit, map(memory_of, node.all_input_nodes)))

    def _is_known_to_the_bit(self, base: fx.Node) -> bool:
        """Return whether fused operations that read a value read the same bits in each graph."""
        if base.op == "placeholder" or self.rules.runs_alone(base) or self._rounds_alike(base):
            return True
        return base.name in self.saved_values.placeholders and _is_single(base)

    def _converts_a_parameter(self, node: fx.Node) -> bool:
        """Return whether a node converts a parameter's dtype for unfused operations alone."""
        return (
            self.rules.is_fused
            and is_conversion(node)
            and memory_of(node.all_input_nodes[0]) in self.saved_values.static
            and self._is_read_alone(node)
        )

    def _is_read_alone(self, node: fx.Node) -> bool:
        """Return whether only operations that are not fused read a value, or views of it."""
        readers = [use for use in uses(node) if source_of(use) is None and use.op != "output"]
        return bool(readers) and all(map(self.rules.runs_alone, readers))

    def lies_in_memory(self, node: fx.Node) -> bool:
        """Return whether a value that is not saved is in memory anyway, as it would be saved.

        It is where only products read it: fused operations would read it before it is rounded.
        """
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            return False
        if not is_tensor(node) or source_of(node) is not None or target.overloadpacket in MOVES:
            return False
        if node in self.saved_values.visible_outside or not self.saved_values.is_large(node):
            return False
        readers = [use for use in uses(node) if source_of(use) is None]
        if not readers or not all(
            is_product(one) and self.rules.runs_alone(one) for one in readers
        ):
            return False
        return _is_plain(node.meta["val"]) and self.saved_values.can_be_offloaded(node, [])


class _Search:
    """The search for the recipe of one value."""

    def __init__(self, recipes: Recipes, goal: fx.Node, tensors: set[fx.Node]) -> None:
        """Start empty; `tensors` are saved values with memory of their own, not a parameter's."""
        self.nodes: dict[fx.Node, None] = {}
        self.sources: dict[fx.Node, None] = {}
        self.parameters: dict[fx.Node, None] = {}
        self._recipes, self._goal, self._tensors = recipes, goal, tensors
        self._saved_values = recipes.saved_values

    def make(self, node: fx.Node) -> bool:
        """Add an operation after its inputs; return False if it cannot be recomputed."""
        if not self._recipes.can_be_recomputed(node) or len(self.nodes) >= LONGEST_RECIPE:
            return False
        if not all(map(self._have, node.all_input_nodes)):
            return False
        self.nodes[node] = None
        return True

    def _have(self, node: fx.Node) -> bool:
        permuted, goal = self._recipes.permuted, self._goal
        if self._is_there(node):
            return True
        if node is goal:
            return False
        if node in permuted:
            return permuted[node] is not goal and self._have(permuted[node])
        before = len(self.nodes), len(self.sources)
        if self.make(node):
            return True
        for added, count in zip((self.nodes, self.sources), before, strict=True):
            while len(added) > count:
                added.popitem()
        return self._take(node)

    def _is_there(self, node: fx.Node) -> bool:
        """Return whether a node's value is in the backward graph, and note it as a source."""
        if node in self.nodes or node in self.sources:
            return True
        if node is self._goal or node.name not in self._saved_values.placeholders:
            return False
        if node in self._saved_values.changed:
            return False
        if node in self._saved_values.static:
            return self._take(node)
        if node in self._tensors:
            self.sources[node] = None
        return True

    def _take(self, node: fx.Node) -> bool:
        """Save a value besides if it is in memory anyway, and return whether it is."""
        if node in self._saved_values.static:
            self.parameters[node] = None
            return self._saved_values.has_known_sizes(node)
        if not self._recipes.lies_in_memory(node):
            return False
        self.sources[node] = None
        return True


def inverse_permutation(node: fx.Node) -> tuple[torch._ops.OpOverload, tuple[Any, ...]] | None:
    """Return the operation and arguments that undo a permutation of dimensions; None for others."""
    if node.target is aten.t.default:
        return aten.t.default, ()
    if node.target is aten.transpose.int:
        return aten.transpose.int, node.args[1:]
    if node.target is aten.permute.default:
        order = list(node.args[1])  # type: ignore[arg-type]  # a list of dimensions
        rank = len(order)
        back = sorted(range(rank), key=lambda at: order[at] % rank)
        return aten.permute.default, (back,)
    return None


def _is_single(node: fx.Node) -> bool:
    """Return whether a value has at least single precision, in which generated code computes."""
    return is_tensor(node) and node.meta["val"].dtype.itemsize >= torch.float32.itemsize


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a compiler gives a value the layout that is written in the graph.

    A compiler may pad strides of values that are not saved, and products read other layouts by
    other kernels.
    """
    if not value.is_contiguous():
        return False
    return all(
        not isinstance(stride, int)
        or stride <= PADDED_STRIDE
        or stride * value.element_size() % PADDED_BYTES == 0
        for stride in value.stride()
    )


def _is_repeatable(node: fx.Node) -> bool:
    """Return whether a value may be the result of a recomputed kernel.

    Of several results only the first may be: it alone is large, and each would be a run of its own.
    """
    if node.target is operator.getitem:
        return bool(node.args[1] == 0)
    return bool(node.meta["val"].is_contiguous())
