"""How a saved value is recomputed in the backward graph, with the same bits.

Only operations that give the same bits wherever they run are recomputed. Their inputs may be kept
for that, besides what is saved, where those lie in memory anyway; parameters always do.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from storm_client.compile.costs import is_product
from storm_client.compile.exactness import MOVES, is_conversion
from storm_client.compile.handover import Handover, uses
from storm_client.compile.views import is_tensor, memory_of, source_of

__all__ = ["Found", "Recipes", "turned_back"]

LONGEST_RECIPE = 16
"""Operations that are recomputed for one value."""

PADDED_STRIDE, PADDED_BYTES = 1024, 128
"""Inductor pads strides above so many elements to multiples of so many bytes, by default."""

aten = torch.ops.aten


class Found(NamedTuple):
    """A recipe as nodes."""

    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    """What is handed over, or would be besides, from which they start."""
    parameters: tuple[fx.Node, ...]
    """Parameters that they read, which stay in memory anyway."""


class Recipes:
    """Looks for recipes of what a forward graph hands over."""

    def __init__(self, there: Handover) -> None:
        """Look at what one graph hands to the other."""
        self.there = there
        self.turned = {
            source_of(n): n for n in there.handed if is_tensor(n) and turned_back(n) is not None
        }
        """Of what is handed over with its dimensions in another order, by what that was."""

    def find(self, node: fx.Node, handed: set[fx.Node]) -> Found | None:
        """Return what makes a value again, and what it is made from; None if nothing may."""
        if memory_of(node) in self.there.returned:
            return None
        search = _Search(self, node, handed)
        if not search.make(node):
            return None
        nodes = tuple(search.nodes)
        given = self.there.placeholders[node.name]
        if not self.there.rules.is_exact(memory_of(node)) and not self._is_read_alone(given):
            return None
        if any(map(self.is_special, nodes)) and not _is_repeatable(node):
            return None
        return Found(nodes, tuple(search.sources), tuple(search.parameters))

    def can_run_again(self, node: fx.Node) -> bool:
        """Tell whether an operation gives the same bits in the backward graph."""
        return node.op == "call_function" and (
            self.there.rules.is_exact(node) or self._rounds_alike(node)
        )

    def is_special(self, node: fx.Node) -> bool:
        """Tell whether the bits of an operation depend on where a compiler puts what it makes."""
        return self.runs_alone(node) or self._rounds_alike(node)

    def runs_alone(self, node: fx.Node) -> bool:
        """Tell whether generated code runs an operation by itself, on what lies in memory."""
        return self.there.rules.runs_alone is not None and self.there.rules.runs_alone(node)

    def _rounds_alike(self, node: fx.Node) -> bool:
        """Tell whether generated code rounds a result of fused operations the same everywhere.

        They begin with what lies in memory, or is handed over as it was in registers, in single
        precision. What is rounded lies in memory, and what is rounded on the way nobody else reads:
        else it might be read rounded in one place, and not in another.
        """
        rule = self.there.rules.rounds_alike
        if self._converts_a_parameter(node):
            return True
        if rule is None or not rule(node) or not is_tensor(node):
            return False
        if not _is_single(node) and len(node.users) != 1 and not self._is_read_alone(node):
            return False
        return all(map(self._is_known_to_the_bit, map(memory_of, node.all_input_nodes)))

    def _is_known_to_the_bit(self, base: fx.Node) -> bool:
        """Tell whether fused operations that read a value read the same bits in each graph."""
        if base.op == "placeholder" or self.runs_alone(base) or self._rounds_alike(base):
            return True
        return base.name in self.there.placeholders and _is_single(base)

    def _converts_a_parameter(self, node: fx.Node) -> bool:
        """Tell whether a node is what products alone read of a parameter, in another type."""
        return (
            self.there.rules.runs_alone is not None
            and is_conversion(node)
            and memory_of(node.all_input_nodes[0]) in self.there.static
            and self._is_read_alone(node)
        )

    def _is_read_alone(self, node: fx.Node) -> bool:
        """Tell whether only operations that are not fused read a value, or views of it."""
        readers = [use for use in uses(node) if source_of(use) is None and use.op != "output"]
        return bool(readers) and all(map(self.runs_alone, readers))

    def lies_in_memory(self, node: fx.Node) -> bool:
        """Tell whether a value that is not handed over is in memory anyway, as handed over.

        It is where products alone read it: fused operations would read what is not rounded yet.
        """
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            return False
        if not is_tensor(node) or source_of(node) is not None or target.overloadpacket in MOVES:
            return False
        if node in self.there.seen_outside or not self.there.is_large(node):
            return False
        readers = [use for use in uses(node) if source_of(use) is None]
        if not readers or not all(is_product(one) and self.runs_alone(one) for one in readers):
            return False
        return _is_plain(node.meta["val"]) and self.there.can_leave(node, [])


class _Search:
    """The search for what makes a value again."""

    def __init__(self, recipes: Recipes, goal: fx.Node, handed: set[fx.Node]) -> None:
        """Begin with nothing; `handed` is what has memory of its own, and not a parameter's."""
        self.nodes: dict[fx.Node, None] = {}
        self.sources: dict[fx.Node, None] = {}
        self.parameters: dict[fx.Node, None] = {}
        self._recipes, self._goal, self._handed = recipes, goal, handed
        self._there = recipes.there

    def make(self, node: fx.Node) -> bool:
        """Add an operation behind what it needs; False where that cannot be had."""
        if not self._recipes.can_run_again(node) or len(self.nodes) >= LONGEST_RECIPE:
            return False
        if not all(map(self._have, node.all_input_nodes)):
            return False
        self.nodes[node] = None
        return True

    def _have(self, node: fx.Node) -> bool:
        turned, goal = self._recipes.turned, self._goal
        if self._is_there(node):
            return True
        if node is goal:
            return False
        if node in turned:
            return turned[node] is not goal and self._have(turned[node])
        before = len(self.nodes), len(self.sources)
        if self.make(node):
            return True
        for added, count in zip((self.nodes, self.sources), before, strict=True):
            while len(added) > count:
                added.popitem()
        return self._take(node)

    def _is_there(self, node: fx.Node) -> bool:
        """Tell whether a node's value is in the backward graph, and note whose it is."""
        if node in self.nodes or node in self.sources:
            return True
        if node is self._goal or node.name not in self._there.placeholders:
            return False
        if node in self._there.changed:
            return False
        if node in self._there.static:
            return self._take(node)
        if node in self._handed:
            self.sources[node] = None
        return True

    def _take(self, node: fx.Node) -> bool:
        """Have a value handed over besides, if it is in memory anyway."""
        if node in self._there.static:
            self.parameters[node] = None
            return self._there.has_known_sizes(node)
        if not self._recipes.lies_in_memory(node):
            return False
        self.sources[node] = None
        return True


def turned_back(node: fx.Node) -> tuple[torch._ops.OpOverload, tuple[Any, ...]] | None:
    """Return what undoes a view that has its source's dimensions in another order, if it is one."""
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
    """Tell whether a value has single precision or more: generated code computes in no other."""
    return is_tensor(node) and node.meta["val"].dtype.itemsize >= torch.float32.itemsize


def _is_plain(value: torch.Tensor) -> bool:
    """Tell whether a compiler gives a value the layout that is written in the graph.

    It may pad strides of what it does not hand over, and products read other layouts by other
    kernels.
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
    """Tell whether a value may be the result of a recomputed kernel.

    Of several results only the first is large: each would be a run of its own.
    """
    if node.target is operator.getitem:
        return bool(node.args[1] == 0)
    return bool(node.meta["val"].is_contiguous())
