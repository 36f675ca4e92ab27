"""Puts a plan into a pair of graphs: stores, fetches, waits, and operations that are run again.

PyTorch's own partitioner decides first what the forward graph hands over, so that a graph without
offload is what the results are compared with. Of that, what is large and may leave is then kept,
offloaded or computed again. Only operations that give the same bits wherever they run are run
again: which those are depends on who generates the code.

What is stored is stored right where it has been made, for a compiler may put nothing in its memory
until then and frees it after its last use. A value that something could be written into in place
of a copy stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, extract_tensor_metadata
from torch.fx.experimental.symbolic_shapes import free_symbols

from storm_client.compile.costs import Machine, machine_of, nbytes_of, seconds_of
from storm_client.compile.operators import FETCH, STORE, WAIT
from storm_client.compile.runtime import Graph
from storm_client.compile.schedule import Recipe, Saved, Schedule, schedule
from storm_client.compile.symbols import can_compute, computed, symbols_of
from storm_client.compile.views import (
    drop_results,
    hand_over_bases,
    is_tensor,
    is_view,
    memory_of,
    source_of,
)
from storm_client.errors import UsageError
from storm_client.plan.decisions import Decision, Keep, Offload, Replay
from storm_client.plan.table import Plan, Row
from storm_client.sizes import format_size
from stormd.protocol import Budget

__all__ = ["NUMBER", "exact_in_eager", "exact_in_generated_code", "partition"]

NUMBER = "stormd_number"
"""Where a wait's node says which value it waits for, in its `meta`."""

LONGEST_RECIPE = 16
"""Operations that are run again for one value."""

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


def exact_in_generated_code(node: fx.Node) -> bool:
    """Tell whether generated code gives the same bits of an operation wherever it is fused."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    if target.overloadpacket in (aten._to_copy, torch.ops.prims.convert_element_type):
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


def partition(
    joint: fx.GraphModule,
    inputs: Sequence[object],
    *,
    budget: Budget,
    min_bytes: int,
    is_exact: Callable[[fx.Node], bool],
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule, Graph]:
    """Return the forward graph, the backward graph, and what their runs have to know.

    Raises:
        UsageError: the budget is below the least possible, which the message names.
    """
    forward, backward = min_cut_rematerialization_partition(
        joint,
        inputs,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static_lifetime_input_indices,
        **options,
    )
    hand_over_bases(forward, backward, num_fwd_outputs)
    pair = _Pair(forward, backward, num_fwd_outputs, static_lifetime_input_indices or [])
    graph = pair.apply(pair.values(min_bytes, is_exact), budget)
    return forward, backward, graph


class _Value(NamedTuple):
    """A tensor that the forward graph hands over."""

    position: int
    """Among the forward graph's outputs."""
    made: fx.Node
    """Where it is made, in the forward graph."""
    given: fx.Node
    """The backward graph's placeholder for it."""
    is_lent: bool
    """Whether a caller may hold its memory."""
    saved: Saved
    recipe: tuple[fx.Node, ...]
    """The forward graph's nodes that make it again, in order."""


class _Pair:
    """A forward graph and its backward graph, which are changed."""

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, static: list[int]
    ) -> None:
        """Look at what one hands to the other, behind the forward's first `outputs` results."""
        self.forward, self.backward = forward, backward
        (self.output,) = forward.graph.find_nodes(op="output")
        self.results: list[Any] = list(self.output.args[0])
        self.handed = self.results[outputs:]
        self.first_handed = outputs
        self.placeholders: dict[str, fx.Node] = {
            n.name: n for n in backward.graph.find_nodes(op="placeholder")
        }
        self.nodes: list[fx.Node] = list(backward.graph.nodes)
        self.positions = {node: index for index, node in enumerate(self.nodes)}
        inputs = forward.graph.find_nodes(op="placeholder")
        primals = [node for node in inputs if str(node.target).startswith("primals")]
        self.static = {primals[index] for index in static if index < len(primals)}
        self.seen_outside = {memory_of(n) for n in self.results[:outputs] if isinstance(n, fx.Node)}
        self.seen_outside |= set(inputs)
        self.symbols = symbols_of(backward.graph)
        self.turned = {source_of(n): n for n in self.handed if is_tensor(n) and _turned_back(n)}
        """Of what is handed over with its dimensions in another order, by what that was."""
        devices = [n.meta["val"].device for n in self.handed if is_tensor(n)]
        self.machine = machine_of(_most_common(devices))

    # --- what there is ----------------------------------------------------------------------

    def values(self, min_bytes: int, is_exact: Callable[[fx.Node], bool]) -> list[_Value]:
        """Return what is handed over and takes memory for that."""
        order = {node: index for index, node in enumerate(self.forward.graph.nodes)}
        found = [
            (self.first_handed + index, node)
            for index, node in enumerate(self.handed)
            if is_tensor(node)
            and node.name in self.placeholders
            and memory_of(node) not in self.static
        ]
        found.sort(key=lambda one: order[one[1]])
        numbers = {node: number for number, (_, node) in enumerate(found)}
        return [self._value(at, node, numbers, min_bytes, is_exact) for at, node in found]

    def _value(
        self,
        position: int,
        node: fx.Node,
        numbers: dict[fx.Node, int],
        min_bytes: int,
        is_exact: Callable[[fx.Node], bool],
    ) -> _Value:
        given = self.placeholders[node.name]
        uses = _uses(given)
        at = [self.positions[use] for use in uses] or [0]
        nbytes = nbytes_of(node.meta["val"])
        can_leave = nbytes >= max(min_bytes, 1) and self._can_leave(node, uses)
        recipe, sources, seconds = None, tuple[fx.Node, ...](), 0.0
        if can_leave:
            found = self._recipe(node, numbers, is_exact)
            if found is not None:
                sources, used = found
                seconds = sum(seconds_of(one, self.machine) for one in sources)
                recipe = Recipe(seconds, used)
        return _Value(
            position,
            node,
            given,
            memory_of(node) in self.seen_outside,
            Saved(nbytes, min(at), max(at), can_leave, recipe),
            sources,
        )

    def _can_leave(self, made: fx.Node, uses: list[fx.Node]) -> bool:
        value = made.meta["val"]
        if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_quantized:
            return False
        if value.device.type not in ("cpu", "cuda") or not is_non_overlapping_and_dense_or_false(
            value
        ):
            return False
        if not can_compute([*value.shape, *value.stride()], self.symbols):
            return False
        if any(use.op == "output" for use in uses):
            return False  # a gradient that is the saved tensor itself
        return not any(map(_writes, (*_uses(memory_of(made)), *uses)))

    def _recipe(
        self,
        node: fx.Node,
        numbers: dict[fx.Node, int],
        is_exact: Callable[[fx.Node], bool],
    ) -> tuple[tuple[fx.Node, ...], tuple[int, ...]] | None:
        """Return what makes a value again, and what it is made from; None if nothing may."""
        nodes: dict[fx.Node, None] = {}
        used: set[int] = set()

        def visit(one: fx.Node) -> bool:
            if one in nodes:
                return True
            if one is not node and (one in numbers or one.name in self.placeholders):
                if one in numbers:
                    used.add(numbers[one])
                return True
            if one is not node and one in self.turned:
                return self.turned[one] is not node and visit(self.turned[one])
            if one.op != "call_function" or not is_exact(one) or len(nodes) >= LONGEST_RECIPE:
                return False
            if not all(map(visit, one.all_input_nodes)):
                return False
            nodes[one] = None
            return True

        return (tuple(nodes), tuple(sorted(used))) if visit(node) else None

    # --- what is done -----------------------------------------------------------------------

    def apply(self, values: list[_Value], budget: Budget) -> Graph:
        """Change both graphs for a budget."""
        seconds = [seconds_of(node, self.machine) for node in self.nodes]
        chosen = schedule([value.saved for value in values], seconds, self.machine.costs)
        total = sum(value.saved.nbytes for value in values)
        in_runs = type(budget) is int or budget == "fit"
        count = 0 if in_runs else chosen.fitting(_allowed(budget, total, chosen))
        if type(budget) is int and budget < chosen.least:
            raise UsageError(
                f"budget is {format_size(budget)}, but a compiled graph needs "
                f"{format_size(chosen.least)} ({chosen.least} bytes) of saved tensors on the "
                "device at once, which is the least possible; raise it, or pass budget='least'"
            )
        decisions = chosen.decisions(count)
        self._offload(values, decisions, chosen)
        self._compute_again(values, decisions, chosen)
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()
        ranks = {number: rank for rank, number in enumerate(chosen.order)} if in_runs else {}
        ranks = {n: rank for n, rank in ranks.items() if isinstance(decisions[n], Offload)}
        return Graph(_plan(values, decisions, chosen, count, self.machine), chosen, ranks)

    def _offload(self, values: list[_Value], decisions: list[Decision], chosen: Schedule) -> None:
        offloaded = [n for n, one in enumerate(decisions) if isinstance(one, Offload)]
        for number in offloaded:
            self._store(values[number], number)
        fetches = sorted(offloaded, key=lambda n: (chosen.fetches[n], chosen.first_uses[n], n))
        waits = sorted(offloaded, key=lambda n: (chosen.first_uses[n], n))
        begun: dict[int, fx.Node] = {}
        pending = iter(fetches)
        ahead = next(pending, None)
        for number in waits:
            use = chosen.first_uses[number]
            while ahead is not None and (chosen.fetches[ahead] <= use or number not in begun):
                begun[ahead] = self._fetch(values[ahead], chosen.fetches[ahead])
                ahead = next(pending, None)
            came = self._wait(values[number], use, list(begun.values()))
            came.meta[NUMBER] = number
            begun = {n: node for n, node in begun.items() if n != number}

    def _store(self, value: _Value, number: int) -> None:
        graph, made = self.forward.graph, value.made
        behind = made
        if made.op == "placeholder":
            behind = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(behind):
            token = graph.call_function(STORE, (made, number, value.is_lent))
        _describe(token, _token_like(made))
        if "saved_tensor_with_no_vc_check" in made.meta:
            token.meta["saved_tensor_with_no_vc_check"] = made.meta["saved_tensor_with_no_vc_check"]
        self.results[value.position] = token
        self.output.update_arg(0, tuple(self.results))

    def _fetch(self, value: _Value, position: int) -> fx.Node:
        graph = self.backward.graph
        with graph.inserting_before(self._at(position)):
            begun = graph.call_function(FETCH, (value.given,))
        _describe(begun, _token_like(value.made))
        return begun

    def _wait(self, value: _Value, position: int, begun: list[fx.Node]) -> fx.Node:
        graph, given, val = self.backward.graph, value.given, value.made.meta["val"]
        users = [user for user in given.users if user.target is not FETCH]
        with graph.inserting_before(self._at(position)):
            size = [computed(one, graph, self.symbols) for one in val.shape]
            stride = [computed(one, graph, self.symbols) for one in val.stride()]
            came = graph.call_function(WAIT, (given, begun, size, stride, val.dtype, val.device))
        _describe(came, given.meta["val"])
        for user in users:
            user.replace_input_with(given, came)
        _describe(given, _token_like(value.made))
        return came

    def _compute_again(
        self, values: list[_Value], decisions: list[Decision], chosen: Schedule
    ) -> None:
        """Copy what makes values again into the backward graph, those first that are used first."""
        again = [n for n, one in enumerate(decisions) if isinstance(one, Replay)]
        here = {value.made: self._present(value) for value in values}
        for number in sorted(again, key=lambda n: (chosen.first_uses[n], n)):
            self._copy_recipe(values[number], chosen.first_uses[number], here)
        dropped = {values[number].position for number in again}
        if dropped:
            drop_results(self.output, dropped)
            self.forward.graph.eliminate_dead_code()

    def _copy_recipe(self, value: _Value, position: int, here: dict[fx.Node, fx.Node]) -> None:
        graph = self.backward.graph
        copies: dict[fx.Node, fx.Node] = {}

        def there(node: fx.Node) -> fx.Node:
            if node in copies:
                return copies[node]
            if node in here:
                return here[node]
            if node.name in self.placeholders:
                return self.placeholders[node.name]
            view: fx.Node = self.turned[node]
            back = _turned_back(view)
            assert back is not None
            copies[node] = graph.call_function(back[0], (there(view), *back[1]))
            copies[node].meta["val"] = node.meta["val"]
            return copies[node]

        with graph.inserting_before(self._at(position)):
            for node in value.recipe:
                copies[node] = graph.node_copy(node, there)
                copies[node].meta["autograd_backward"] = True
        made = copies[value.made]
        value.given.replace_all_uses_with(made)
        graph.erase_node(value.given)
        here[value.made] = made

    def _present(self, value: _Value) -> fx.Node:
        """Return the backward graph's node that has a value."""
        return next((user for user in value.given.users if user.target is WAIT), value.given)

    def _at(self, position: int) -> fx.Node:
        """Return the node before which something can stand: placeholders come first."""
        while self.nodes[position].op == "placeholder":
            position += 1
        return self.nodes[position]


def _plan(
    values: list[_Value],
    decisions: list[Decision],
    chosen: Schedule,
    count: int,
    machine: Machine,
) -> Plan:
    rows, link, again = [], 0.0, 0.0
    for value, decision in zip(values, decisions, strict=True):
        saved, val = value.saved, value.made.meta["val"]
        cost = 0.0
        name, reason = "keep", decision.reason if isinstance(decision, Keep) else ""
        if isinstance(decision, Offload):
            name, reason = "offload", "shipped"
            cost = saved.nbytes * machine.costs.link
            link += cost
        elif isinstance(decision, Replay):
            assert saved.recipe is not None
            name, reason, cost = "replay", "computed sooner than shipped", saved.recipe.seconds
            again += cost
        shape = tuple(map(int, val.shape)) if not free_symbols(val) else ()
        operation = str(value.made.target)
        rows.append(Row(operation, shape, val.dtype, saved.nbytes, name, reason, cost))
    return Plan(tuple(rows), chosen.peaks[count], link, again, 0.0)


def _allowed(budget: Budget, total: int, chosen: Schedule) -> int:
    share = int(budget * total) if isinstance(budget, float) else 0
    return max(chosen.least, share)


def _turned_back(node: fx.Node) -> tuple[torch._ops.OpOverload, tuple[Any, ...]] | None:
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


def _uses(node: fx.Node) -> list[fx.Node]:
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


def _writes(node: fx.Node) -> bool:
    """Tell whether a node may write to what it uses, or a compiler may have it do so."""
    if node.op == "output" or node.target is operator.getitem:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return not _is_symbolic(node) and str(target) not in _READING
    if target.namespace == "_c10d_functional":
        return True
    return target._schema.is_mutable or target.overloadpacket in _WRITTEN_IN_PLACE


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _widens(node: fx.Node) -> bool:
    source, made = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    return torch.promote_types(source.dtype, made.dtype) == made.dtype


def _most_common(devices: Iterable[torch.device]) -> torch.device:
    counted = list(devices)
    return max(counted, key=counted.count) if counted else torch.device("cpu")


def _token_like(node: fx.Node) -> torch.Tensor:
    with node.meta["val"].fake_mode:
        return torch.empty(1, dtype=torch.int64, device="cpu")


def _describe(node: fx.Node, value: torch.Tensor) -> None:
    node.meta["val"] = value
    node.meta["tensor_meta"] = extract_tensor_metadata(value)
