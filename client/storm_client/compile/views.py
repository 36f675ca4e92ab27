"""Changes which values a forward graph saves: bases in place of views, more values, or fewer.

Also says of a node's value whether it is a tensor or a view, and how many bytes it has.

For example, a product of queries, keys and values is saved as three views, none of which has memory
of its own. Then the product is saved once instead, and the backward graph makes the same views.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from itertools import count

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch._prims_common import is_non_overlapping_and_dense_or_false

__all__ = [
    "add_saved",
    "drop_results",
    "hint_of",
    "is_tensor",
    "is_view",
    "is_view_node",
    "memory_of",
    "nbytes_of",
    "save_bases",
    "source_of",
]


def is_tensor(node: object) -> bool:
    """Return whether a node's value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_view(target: torch._ops.OpOverload) -> bool:
    """Return whether an operator returns views of its first argument."""
    return any(one.alias_info is not None for one in target._schema.returns)


def nbytes_of(value: object) -> int:
    """Return the bytes of a traced tensor or of several, by the sizes seen when it was traced."""
    if isinstance(value, (tuple, list)):
        return sum(map(nbytes_of, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return hint_of(value.numel()) * value.element_size()


def hint_of(size: int | torch.SymInt) -> int:
    """Return a size as it was when the graph was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def is_view_node(node: fx.Node) -> bool:
    """Return whether a node returns views of its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node.target)


def source_of(node: fx.Node) -> fx.Node | None:
    """Return the node of which a node is a view; None for a value with memory of its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        return parent if source_of(parent) is not None else None
    if is_view_node(node):
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def memory_of(node: fx.Node) -> fx.Node:
    """Return the node that has made the memory of a node's value."""
    while (source := source_of(node)) is not None:
        node = source
    return node


def save_bases(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Save the base of views instead of them, where one is not dense and all of it is used.

    The first `outputs` results are the caller's; views of their memory stay as they are.
    """
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    outside = {memory_of(node) for node in results[:outputs] if isinstance(node, fx.Node)}
    groups: dict[fx.Node, list[int]] = {}
    for position, node in enumerate(results[outputs:], outputs):
        if is_tensor(node) and node.name in given:
            groups.setdefault(memory_of(node), []).append(position)
    dropped: set[int] = set()
    for base, positions in groups.items():
        views = [results[position] for position in positions]
        if (
            base in outside
            or not _is_worth_it(base, views)
            or not _can_make_views(base, views, backward)
        ):
            continue
        placeholders = [given[view.name] for view in views]
        if any(not one.users for one in placeholders):
            continue
        _make_views(base, views, placeholders, backward.graph)
        results[positions[0]] = base
        if "saved_tensor_with_no_vc_check" in views[0].meta:
            base.meta["saved_tensor_with_no_vc_check"] = True
        dropped.update(positions[1:])
    output.update_arg(0, tuple(results))
    drop_results(output, dropped)


def drop_results(output: fx.Node, dropped: Collection[int]) -> None:
    """Remove the results at the indices `dropped` from a forward graph."""
    if not dropped:
        return
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    kept = [place for place in range(len(results)) if place not in dropped]
    output.update_arg(0, tuple(results[place] for place in kept))
    if "desc" in output.meta:
        output.meta["desc"] = [output.meta["desc"][place] for place in kept]


def add_saved(
    node: fx.Node, forward: fx.GraphModule, backward: fx.GraphModule, place: int
) -> fx.Node:
    """Save another tensor, at the index `place` among the forward graph's results.

    The result at `place` so far is a saved tensor. Returns the backward graph's placeholder, which
    has the node's name; if that name is taken, the node is renamed.
    """
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    next_one = next(n for n in backward.graph.nodes if n.name == results[place].name)
    names = {one.name for graph in (forward.graph, backward.graph) for one in graph.nodes}
    if any(one.name == node.name for one in backward.graph.nodes):
        node._rename(next(f"{node.name}_{n}" for n in count(1) if f"{node.name}_{n}" not in names))
    with backward.graph.inserting_before(next_one):
        given = backward.graph.placeholder(node.name)
    given.meta["val"] = node.meta["val"]
    given.meta["tensor_meta"] = node.meta.get("tensor_meta")
    output.update_arg(0, (*results[:place], node, *results[place:]))
    if "desc" in output.meta:
        descriptions = list(output.meta["desc"])
        descriptions.insert(place, SavedForBackwardsAOTOutput(len(results)))
        output.meta["desc"] = descriptions
    return given


def _is_worth_it(base: fx.Node, views: list[fx.Node]) -> bool:
    """Return whether a view cannot be offloaded, and the base has no more bytes than all views."""
    if base.op != "call_function" or not is_tensor(base) or base in views:
        return False
    if all(map(_is_dense, views)) or not _is_dense(base):
        return False
    return sum(nbytes_of(view.meta["val"]) for view in views) >= nbytes_of(base.meta["val"])


def _can_make_views(base: fx.Node, views: list[fx.Node], backward: fx.GraphModule) -> bool:
    """Return whether the backward graph can make the same views from the base alone.

    Their other arguments must be numbers, and the base's name must be free.
    """
    if any(node.name == base.name for node in backward.graph.nodes):
        return False
    return all(len(node.all_input_nodes) == 1 for view in views for node in _steps(base, view))


def _make_views(base: fx.Node, views: list[fx.Node], given: list[fx.Node], graph: fx.Graph) -> None:
    """Replace the placeholders `given` of views by one of their base, and views of that."""
    users = {user for one in given for user in one.users}
    with graph.inserting_before(given[0]):
        whole = graph.placeholder(base.name)
    whole.meta["val"] = base.meta["val"]
    whole.meta["tensor_meta"] = base.meta.get("tensor_meta")
    first = next(node for node in graph.nodes if node in users)
    copies = {base: whole}
    with graph.inserting_before(first):
        for node in dict.fromkeys(node for view in views for node in _steps(base, view)):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta["autograd_backward"] = True
    for view, old in zip(views, given, strict=True):
        old.replace_all_uses_with(copies[view])
        graph.erase_node(old)


def _steps(base: fx.Node, view: fx.Node) -> list[fx.Node]:
    """Return the nodes on the way from `base` to a view of it, in order."""
    found: list[fx.Node] = []
    node: fx.Node | None = view
    while node is not None and node is not base:
        found.append(node)
        node = source_of(node)
    return found[::-1]


def _is_dense(node: fx.Node) -> bool:
    return bool(is_non_overlapping_and_dense_or_false(node.meta["val"]))
