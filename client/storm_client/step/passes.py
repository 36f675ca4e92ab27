"""Rewrites a recorded step before it is planned: rolls its loop, removes nodes, orders the rest.

Two operations may change places only where neither writes to memory that the other uses. Each
node's `meta` says which memory that is. Random operations are neither removed nor repeated, so
generators advance as they do without a capture.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from storm_client.compile.operators import describe
from storm_client.compile.views import nbytes_of
from storm_client.errors import UsageError
from storm_client.step.captured import Captured
from storm_client.step.nodes import (
    BACKWARD,
    MEMORY,
    MICRO_BATCH,
    WRITTEN,
    is_random,
    memories,
    reads,
    writes,
    written_by,
)

__all__ = [
    "Carry",
    "Ordered",
    "is_number",
    "numbers_at_the_end",
    "ordered",
    "without_repeats",
]

aten = torch.ops.aten

LARGEST_CONSTANT = 1 << 20
"""Bytes of the largest result that is computed once and then kept."""

BODY = 2
"""The micro-batch that stands for all but the first."""

_NEW = {
    aten.arange,
    aten.full,
    aten.ones,
    aten.scalar_tensor,
    aten.zeros,
    aten.eye,
    aten.linspace,
}
"""Operations without tensor arguments whose result can be computed once."""


@dataclass(frozen=True, slots=True)
class Carry:
    """A value that a micro-batch passes to the next."""

    given: fx.Node
    """The placeholder that each micro-batch but the first reads."""
    first: fx.Node
    """The value that the first micro-batch makes."""
    made: fx.Node
    """The value that each further micro-batch makes for the next."""


@dataclass
class Ordered:
    """The nodes of a step: first those that change no state, then those that do."""

    work: list[fx.Node] = field(default_factory=list)
    late: list[fx.Node] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)
    constants: dict[fx.Node, Any] = field(default_factory=dict)
    results: list[fx.Node | None] = field(default_factory=list)
    """The nodes of the returned values, then of the side effects; None for constants."""
    detached: set[int] = field(default_factory=set)
    """Indices in `results` of inputs that are returned as detached views."""
    pruned: int = 0
    folded: int = 0
    repeated: int = 0

    def of_micro_batch(self, number: int) -> list[fx.Node]:
        """Return the nodes of `work` that belong to one micro-batch."""
        return [node for node in self.work if node.meta[MICRO_BATCH] == number]


def ordered(captured: Captured) -> Ordered:
    """Return the nodes of a captured step in the order in which they are to run.

    Raises:
        UsageError: the micro-batches of its loop differ, results of single micro-batches are used
            after the loop, or a tensor that is changed and used again shares its memory.
    """
    found = Ordered()
    graph = captured.recording.graph
    found.constants.update(captured.recording.constants)
    found.results = [one.node for one in (*captured.returned, *captured.side_effects)]
    _copy_updated_state(captured)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    nodes = _without_aliases(nodes, found)
    nodes = _rolled(nodes, captured, found)
    nodes = _folded(nodes, found)
    nodes = _needed(nodes, found)
    late = _late(nodes)
    found.work = [node for node in nodes if node not in late]
    found.late = _numbers_first([node for node in nodes if node in late])
    return found


def outside(nodes: Iterable[fx.Node]) -> frozenset[int]:
    """Return the storages of a graph's placeholders, given any nodes of the graph."""
    first = next(iter(nodes), None)
    if first is None:
        return frozenset()
    return frozenset().union(*map(memories, first.graph.find_nodes(op="placeholder")))


# --- state that the step changes and then reads -------------------------------------------------


def _copy_updated_state(captured: Captured) -> None:
    """Copy state that the step changes and then uses, such as running statistics.

    The step works on the copies, which are written back at its end. So all changes of state can
    come last.
    """
    graph = captured.recording.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    ends = [index for index, node in enumerate(nodes) if node.meta[BACKWARD]]
    end = ends[-1] if ends else 0
    there = outside(nodes)
    written: set[int] = set()
    copied: set[int] = set()
    for index, node in enumerate(nodes):
        memory = writes(node) & there
        if node.meta[MICRO_BATCH] > 0 or not _only_writes(node):
            copied |= memory
        if index < end:
            copied |= reads(node) & written
        written |= memory
    for placeholder in graph.find_nodes(op="placeholder"):
        if memories(placeholder) & copied:
            _copy(placeholder, nodes, graph)


def _only_writes(node: fx.Node) -> bool:
    """Return whether an operation writes nothing, or returns only what it has written to."""
    if not writes(node):
        return True
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.is_mutable and all(
        one.alias_info is not None and one.alias_info.is_write
        for one in node.target._schema.returns
    )


def _copy(placeholder: fx.Node, nodes: Sequence[fx.Node], graph: fx.Graph) -> None:
    (memory,) = memories(placeholder)
    sharing = [n for n in graph.find_nodes(op="placeholder") if memory in memories(n)]
    if len(sharing) > 1:
        raise UsageError(
            "the step changes a tensor and uses it again, which shares its memory with another "
            f"({', '.join(str(n.meta['val'].shape) for n in sharing)}); use one of them"
        )
    with graph.inserting_before(nodes[0]):
        copy = graph.call_function(aten.clone.default, (placeholder,))
    placeholder.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    new = -1 - memory
    for node in nodes:
        for key in (MEMORY, WRITTEN):
            if memory in node.meta[key]:
                node.meta[key] = (node.meta[key] - {memory}) | {new}
    copy.meta.update(placeholder.meta)
    copy.meta.update(
        {MEMORY: frozenset((new,)), WRITTEN: frozenset(), BACKWARD: False, MICRO_BATCH: 0}
    )
    val = placeholder.meta["val"]
    with val.fake_mode:  # a compiler takes inputs of a graph for one if they are one fake tensor
        own = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    describe(copy, own)
    with graph.inserting_after(list(graph.nodes)[-1]):
        back = graph.call_function(aten.copy_.default, (placeholder, copy))
    back.meta.update(
        {MEMORY: frozenset(), WRITTEN: frozenset((memory,)), BACKWARD: False, MICRO_BATCH: -1}
    )


# --- the loop -----------------------------------------------------------------------------------


def _rolled(nodes: list[fx.Node], captured: Captured, found: Ordered) -> list[fx.Node]:
    """Return the nodes with one micro-batch in place of the second and all further ones."""
    if 0 < captured.recording.micro_batch < captured.loop.count:
        raise _differs("the step leaves the loop before its end")
    if captured.loop.count <= BODY:
        return nodes
    second = [node for node in nodes if node.meta[MICRO_BATCH] == BODY]
    third = [node for node in nodes if node.meta[MICRO_BATCH] == BODY + 1]
    behind = [node for node in nodes if node.meta[MICRO_BATCH] == -1]
    if _signature(second) != _signature(third):
        raise _differs("the second and third micro-batch run other operations")
    used = {one for one in found.results if one is not None}
    used.update(source for node in behind for source in node.all_input_nodes)
    if used.intersection(second):
        raise _differs("what a micro-batch in the middle has made is used after the loop")
    slices = captured.loop.slices
    same = dict(zip([*third, *slices[2]], [*second, *slices[1]], strict=True))
    carries: dict[tuple[fx.Node, fx.Node], Carry] = {}
    for later in third:
        _carry(same[later], later, same, carries, captured)
    found.carries = list(carries.values())
    found.results = [None if one is None else same.get(one, one) for one in found.results]
    for node in behind:
        for source in same.keys() & set(node.all_input_nodes):
            node.replace_input_with(source, same[source])
    return [node for node in nodes if node.meta[MICRO_BATCH] != BODY + 1]


def _signature(nodes: list[fx.Node]) -> list[Any]:
    return [(node.target, node.meta[BACKWARD], len(node.all_input_nodes)) for node in nodes]


def _carry(
    node: fx.Node,
    later: fx.Node,
    same: dict[fx.Node, fx.Node],
    carries: dict[tuple[fx.Node, fx.Node], Carry],
    captured: Captured,
) -> None:
    """Make a node of the body read the value that the previous micro-batch has made."""
    mine, shape = pytree.tree_flatten((node.args, node.kwargs))
    theirs, other = pytree.tree_flatten((later.args, later.kwargs))
    if shape != other:
        raise _differs("the second and third micro-batch use other arguments")
    replaced = []
    for one, two in zip(mine, theirs, strict=True):
        value = one
        if isinstance(one, fx.Node) and isinstance(two, fx.Node):
            if one.meta[MICRO_BATCH] == 1 and two.meta[MICRO_BATCH] == BODY:
                value = _carried(one, two, carries, captured)
            elif same.get(two) is not one and one is not two:
                raise _differs("a micro-batch uses what another than the one before it has made")
        elif one is not two and one != two:
            raise _differs(f"the second uses {one!r} where the third uses {two!r}")
        replaced.append(value)
    arguments, options = pytree.tree_unflatten(replaced, shape)
    node.args, node.kwargs = arguments, options


def _carried(
    first: fx.Node,
    made: fx.Node,
    carries: dict[tuple[fx.Node, fx.Node], Carry],
    captured: Captured,
) -> fx.Node:
    if (first, made) not in carries:
        graph = captured.recording.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            given = graph.placeholder(f"carried_{len(carries)}")
        given.meta.update(first.meta)
        given.meta[MICRO_BATCH] = BODY
        carries[first, made] = Carry(given, first, made)
    return carries[first, made].given


def _differs(how: str) -> UsageError:
    return UsageError(
        f"the micro-batches of the step's loop cannot be run as one: {how}; have each do the same, "
        "and sum up what they make in variables instead of listing it"
    )


# --- operations that need not run ---------------------------------------------------------------


def _without_aliases(nodes: list[fx.Node], found: Ordered) -> list[fx.Node]:
    """Remove operations that only return their argument, as `detach` does without autograd."""
    kept = []
    for node in nodes:
        if node.target in (aten.detach.default, aten.alias.default):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            places = {place for place, one in enumerate(found.results) if one is node}
            found.results = [source if one is node else one for one in found.results]
            if source.op == "placeholder":
                found.detached |= places
        else:
            kept.append(node)
    return kept


def _folded(nodes: list[fx.Node], found: Ordered) -> list[fx.Node]:
    """Compute small results once that are the same in each run and that nobody writes to."""
    results = [one for one in found.results if one is not None]
    touched = written_by(nodes).union(*map(memories, results))
    kept = []
    known: dict[fx.Node, Any] = dict(found.constants)
    for node in nodes:
        made = None if memories(node) & touched else _constant(node, known)
        if made is None:
            kept.append(node)
            continue
        known[node] = made
    for node, value in known.items():
        if node.op == "call_function" and any(user not in known for user in node.users):
            graph = node.graph
            with graph.inserting_before(next(iter(graph.nodes))):
                held = graph.placeholder(f"constant_{len(found.constants)}")
            held.meta.update(node.meta)
            held.meta.update({MICRO_BATCH: 0, BACKWARD: False})
            node.replace_all_uses_with(held)
            found.constants[held] = value
    found.folded = len(nodes) - len(kept)
    return kept


def _constant(node: fx.Node, known: dict[fx.Node, Any]) -> torch.Tensor | None:
    """Return the value that a node has in every run; None where it is not known."""
    target, val = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(val, torch.Tensor):
        return None
    if nbytes_of(val) > LARGEST_CONSTANT or target._schema.is_mutable or _has_effect(node):
        return None
    sources = node.all_input_nodes
    if not sources and target.overloadpacket not in _NEW:
        return None
    if torch.Tag.nondeterministic_bitwise in target.tags:
        return None
    if any(source not in known for source in sources):
        return None
    arguments, options = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    with torch.no_grad():
        made = target(*arguments, **options)
    return made if isinstance(made, torch.Tensor) else None


def _needed(nodes: list[fx.Node], found: Ordered) -> list[fx.Node]:
    """Remove the nodes that no result needs."""
    there = outside(nodes)
    needed = {one for one in found.results if one is not None}
    alive: set[int] = set(there)
    for one in needed:
        alive |= memories(one)
    for carry in found.carries:
        needed |= {carry.first, carry.made}
        alive |= memories(carry.first) | memories(carry.made)
    for node in nodes:
        if node.meta[MICRO_BATCH] == BODY:
            alive |= reads(node)  # the next micro-batch may read what this one writes
    kept = []
    for node in reversed(nodes):
        if node in needed or writes(node) & alive or _has_effect(node):
            kept.append(node)
            needed.update(node.all_input_nodes)
            alive |= reads(node)
    found.pruned = len(nodes) - len(kept)
    return kept[::-1]


def _has_effect(node: fx.Node) -> bool:
    """Return whether an operation does more than compute its results.

    It draws random numbers, returns nothing and may raise, as checks do, or is a custom one, which
    may do more than its schema says.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    is_check = not target._schema.returns and not target._schema.is_mutable
    return is_check or is_random(node) or target.namespace not in ("aten", "prims")


def without_repeats(nodes: Sequence[fx.Node], found: Ordered) -> list[fx.Node]:
    """Return nodes that compute each repeated result only once.

    Random operations are not merged, nor those on memory that is written to or returned.
    """
    given = {one for one in found.results if one is not None}
    touched = written_by(found.work).union(*map(memories, given))
    seen: dict[Any, fx.Node] = {}
    kept = []
    for node in nodes:
        key = None if (memories(node) | reads(node)) & touched else _key(node)
        if key is None or node in given:
            kept.append(node)
        elif key in seen:
            node.replace_all_uses_with(seen[key])
            found.repeated += 1
        else:
            seen[key] = node
            kept.append(node)
    return kept


def _key(node: fx.Node) -> Any:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target._schema.is_mutable or _has_effect(node):
            return None
        if not node.all_input_nodes and target.overloadpacket not in _NEW:
            return None
    elif target is not operator.getitem and node.meta.get("val") is not None:
        return None
    key = (target, _frozen(node.args), _frozen(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple(sorted((key, _frozen(one)) for key, one in value.items()))
    return (type(value), value)  # 1, 1.0 and True are different scalars


# --- order --------------------------------------------------------------------------------------


def _late(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes that change state, and the nodes that must come after them."""
    there = outside(nodes)
    ends = [index for index, node in enumerate(nodes) if node.meta[BACKWARD]]
    end = ends[-1] if ends else -1
    late: set[fx.Node] = set()
    read, written = set[int](), set[int]()
    has_begun = False
    for index, node in enumerate(nodes):
        memory = writes(node)
        if (
            has_begun
            or memory & there
            or reads(node) & written
            or memory & (read | written)
            or any(source in late for source in node.all_input_nodes)
        ):
            late.add(node)
            read |= reads(node)
            written |= memory | memories(node)
            has_begun = has_begun or (index > end and bool(memory & there))
    known = set(nodes)
    for node in reversed(nodes):
        is_used_by_work = any(user in known and user not in late for user in node.users)
        if _is_plain_number(node) and not is_used_by_work and node.meta[MICRO_BATCH] <= 0:
            late.add(node)
    return late


def _numbers_first(late: Sequence[fx.Node]) -> list[fx.Node]:
    """Return late nodes with the numbers first that no write before them changes.

    Python's arithmetic may raise, as by a division by zero. It then does so before any write.
    """
    there, movable, written = set(late), set[fx.Node](), set[int]()
    for node in late:
        is_own = isinstance(node.target, torch._ops.OpOverload) and _has_effect(node)
        sources = there.intersection(node.all_input_nodes)
        if writes(node) or is_own or reads(node) & written or not sources <= movable:
            written |= writes(node)
        else:
            movable.add(node)
    first = set[fx.Node]()
    for node in reversed(late):
        if node in movable and (is_number(node) or first.intersection(node.users)):
            first.add(node)
    return [node for node in late if node in first] + [one for one in late if one not in first]


def _is_plain_number(node: fx.Node) -> bool:
    return is_number(node) and not isinstance(node.target, torch._ops.OpOverload)


def is_number(node: fx.Node) -> bool:
    """Return whether a node gives a number: `.item()`, or what Python computes with numbers."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target is aten._local_scalar_dense.default
    return node.op == "call_function" and node.meta.get("val") is None


def numbers_at_the_end(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return those of some nodes that give numbers and may run after all others."""
    there, found, written = set(nodes), list[fx.Node](), set[int]()
    for node in reversed(nodes):
        is_used = any(user in there for user in node.users)
        if is_number(node) and not is_used and not reads(node) & written:
            found.append(node)
            there.remove(node)
        else:
            written |= writes(node)
    return found[::-1]
