"""Puts a plan into a pair of graphs: stores, fetches, waits, and operations that are run again.

PyTorch's own partitioner decides first what the forward graph hands over, so that a graph without
offload is what the results are compared with. Of that, what is large and may leave is then kept,
offloaded or computed again. Only operations that give the same bits wherever they run are run
again: which those are depends on who generates the code. What one of them reads that would not be
handed over may be, besides, where that is less than what is made from it.

What is stored is stored right where it has been made, for a compiler may put nothing in its memory
until then and frees it after its last use. A value that something could be written into in place
of a copy stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, extract_tensor_metadata
from torch.fx.experimental.symbolic_shapes import free_symbols

from storm_client.compile.costs import (
    Machine,
    is_product,
    machine_of,
    nbytes_of,
    ratio_of,
    seconds_of,
)
from storm_client.compile.operators import FETCH, HOLD, SEEN, STORE, WAIT
from storm_client.compile.runtime import Graph
from storm_client.compile.schedule import Draft, Recipe, Saved, Schedule, schedule
from storm_client.compile.symbols import can_compute, computed, symbols_of
from storm_client.compile.views import (
    drop_results,
    hand_over,
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

__all__ = ["NUMBER", "divided", "exact_in_eager", "exact_in_generated_code", "partition"]

NUMBER = "stormd_number"
"""Where a wait's node says which value it waits for, in its `meta`."""

LONGEST_RECIPE = 16
"""Operations that are run again for one value."""

PADDED_STRIDE, PADDED_BYTES = 1024, 128
"""Inductor pads strides above so many elements to multiples of so many bytes, by default."""

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
    if _is_conversion(node):
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
    runs_alone: Callable[[fx.Node], bool] | None = None,
    rounds_alike: Callable[[fx.Node], bool] | None = None,
    codec: str = "ancf",
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule, Graph]:
    """Return the forward graph, the backward graph, and what their runs have to know.

    `is_exact` tells of an operation whether it gives the same bits wherever it runs. Where others
    are fused, `runs_alone` tells which are not, and read what lies in memory, and `rounds_alike`
    which give the same bits if they begin with that.

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
    rules = _Rules(min_bytes, is_exact, runs_alone, rounds_alike, codec)
    static = static_lifetime_input_indices or []
    graph = _divided(
        forward, backward, outputs=num_fwd_outputs, static=static, rules=rules, budget=budget
    )
    return forward, backward, graph


def divided(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    budget: Budget,
    min_bytes: int,
    is_exact: Callable[[fx.Node], bool],
    codec: str,
    num_fwd_outputs: int,
    static: list[int],
) -> Graph:
    """Put a plan into a pair of graphs, which are changed; return what their runs have to know.

    The forward graph's results from `num_fwd_outputs` on are the backward graph's first inputs.
    `static` are the places of its inputs that live longer than it does.

    Raises:
        UsageError: the budget is below the least possible, which the message names.
    """
    rules = _Rules(min_bytes, is_exact, None, None, codec)
    return _divided(
        forward, backward, outputs=num_fwd_outputs, static=static, rules=rules, budget=budget
    )


class _Rules(NamedTuple):
    """What was asked for, and what the code's generator does."""

    min_bytes: int
    is_exact: Callable[[fx.Node], bool]
    runs_alone: Callable[[fx.Node], bool] | None
    rounds_alike: Callable[[fx.Node], bool] | None
    codec: str


def _divided(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    outputs: int,
    static: list[int],
    rules: _Rules,
    budget: Budget,
) -> Graph:
    hand_over_bases(forward, backward, outputs)
    pair = _Pair(forward, backward, outputs, static, rules)
    return pair.apply(pair.values(), budget)


class _Value(NamedTuple):
    """A tensor that the forward graph hands over."""

    made: fx.Node
    """Where it is made, in the forward graph."""
    given: fx.Node
    """The backward graph's placeholder for it."""
    is_lent: bool
    """Whether a caller may hold its memory."""
    saved: Saved
    recipe: tuple[fx.Node, ...]
    """The forward graph's nodes that make it again, in order."""


class _Found(NamedTuple):
    """A recipe as nodes."""

    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    """What is handed over, or would be besides, from which they start."""
    parameters: tuple[fx.Node, ...]
    """Parameters that they read, which stay in memory anyway."""


class _Search:
    """The search for what makes a value again."""

    def __init__(self, pair: _Pair, goal: fx.Node, handed: set[fx.Node]) -> None:
        """Begin with nothing; `handed` is what has memory of its own, and not a parameter's."""
        self.nodes: dict[fx.Node, None] = {}
        self.sources: dict[fx.Node, None] = {}
        self.parameters: dict[fx.Node, None] = {}
        self._pair, self._goal, self._handed = pair, goal, handed

    def make(self, node: fx.Node) -> bool:
        """Add an operation behind what it needs; False where that cannot be had."""
        if not self._pair.can_run_again(node) or len(self.nodes) >= LONGEST_RECIPE:
            return False
        if not all(map(self._have, node.all_input_nodes)):
            return False
        self.nodes[node] = None
        return True

    def _have(self, node: fx.Node) -> bool:
        turned, goal = self._pair.turned, self._goal
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
        if node is self._goal or node.name not in self._pair.placeholders:
            return False
        if node in self._pair.changed:
            return False
        if node in self._pair.static:
            return self._take(node)
        if node in self._handed:
            self.sources[node] = None
        return True

    def _take(self, node: fx.Node) -> bool:
        """Have a value handed over besides, if it is in memory anyway."""
        if node in self._pair.static:
            self.parameters[node] = None
            return self._pair.has_known_sizes(node)
        if not self._pair.lies_in_memory(node):
            return False
        self.sources[node] = None
        return True


class _Pair:
    """A forward graph and its backward graph, which are changed."""

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        outputs: int,
        static: list[int],
        rules: _Rules,
    ) -> None:
        """Look at what one hands to the other, behind the forward's first `outputs` results."""
        self.forward, self.backward, self.rules = forward, backward, rules
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
        self.changed = _changed(inputs, self.output)
        self.static -= self.changed
        self.returns_a_loss = any(
            is_tensor(n) and n.meta["val"].dim() == 0 and n.meta["val"].is_floating_point()
            for n in self.results[:outputs]
        )
        self.seen_outside = {memory_of(n) for n in self.results[:outputs] if isinstance(n, fx.Node)}
        self.seen_outside |= set(inputs)
        self.lent: dict[fx.Node, fx.Node] = {}
        """Placeholders for the tokens of the parameters that others are computed again from."""
        self.symbols = symbols_of(backward.graph)
        self.turned = {source_of(n): n for n in self.handed if is_tensor(n) and _turned_back(n)}
        """Of what is handed over with its dimensions in another order, by what that was."""
        devices = [n.meta["val"].device for n in self.handed if is_tensor(n)]
        self.machine = machine_of(_most_common(devices))

    # --- what there is ----------------------------------------------------------------------

    def values(self) -> list[_Value]:
        """Return what is handed over and takes memory for that, or would be with offload."""
        order = {node: index for index, node in enumerate(self.forward.graph.nodes)}
        handed = {
            node
            for node in self.handed
            if is_tensor(node)
            and node.name in self.placeholders
            and memory_of(node) not in self.static
        }
        leaving = {node for node in handed if self._may_leave(node)}
        recipes = {node: self._recipe(node, handed) for node in leaving}
        besides = {n for one in recipes.values() if one for n in one.sources} - handed
        lent = {n for one in recipes.values() if one for n in one.parameters}
        self._hand_over(sorted(besides, key=order.__getitem__))
        self._lend(sorted(lent, key=order.__getitem__))
        made = self._seconds_made()
        found = sorted(handed | besides, key=order.__getitem__)
        numbers = {node: number for number, node in enumerate(found)}
        values = []
        for node in found:
            recipe, leaves = recipes.get(node), node in leaving or node in besides
            saved = self._saved(node, recipe, numbers, made[node], can_leave=leaves)
            values.append(
                _Value(
                    node,
                    self.placeholders[node.name],
                    memory_of(node) in self.seen_outside,
                    saved,
                    recipe.nodes if recipe else (),
                )
            )
        return values

    def _saved(
        self,
        node: fx.Node,
        recipe: _Found | None,
        numbers: dict[fx.Node, int],
        made: float,
        *,
        can_leave: bool,
    ) -> Saved:
        val = node.meta["val"]
        nbytes, ratio = nbytes_of(val), ratio_of(val.dtype, self.rules.codec)
        uses = _uses(self.placeholders[node.name])
        if not uses and can_leave:
            return Saved.only_a_source(nbytes, made=made, ratio=ratio)
        at = [self.positions[use] for use in uses] or [0]
        how = None
        if recipe is not None:
            sources = tuple(sorted(numbers[one] for one in recipe.sources if one in numbers))
            how = Recipe(sum(map(self._seconds_of, recipe.nodes)), sources)
        return Saved(nbytes, min(at), max(at), can_leave, how, made, ratio)

    def _seconds_of(self, node: fx.Node) -> float:
        return seconds_of(node, self.machine, is_fused=self.rules.runs_alone is not None)

    def _seconds_made(self) -> dict[fx.Node, float]:
        """Return when each node of the forward graph has run, in seconds after its beginning."""
        nodes = list(self.forward.graph.nodes)
        return dict(zip(nodes, accumulate(map(self._seconds_of, nodes)), strict=True))

    def _hand_over(self, besides: list[fx.Node]) -> None:
        """Hand over what others may be computed from, in front of the rest."""
        for node in reversed(besides):
            given = hand_over(node, self.forward, self.backward, self.first_handed)
            self.placeholders[node.name] = given
        self.results = list(self.output.args[0])

    def _lend(self, parameters: list[fx.Node]) -> None:
        """Hand over tokens for parameters as they are: others may be given to the model later."""
        for node in parameters:
            behind = self.forward.graph.find_nodes(op="placeholder")[-1]
            with self.forward.graph.inserting_after(behind):
                token = self.forward.graph.call_function(HOLD, (node,))
            _describe(token, _token_like(node))
            self.lent[node] = hand_over(token, self.forward, self.backward, self.first_handed)
        self.results = list(self.output.args[0])

    def _may_leave(self, node: fx.Node) -> bool:
        large = nbytes_of(node.meta["val"]) >= max(self.rules.min_bytes, 1)
        return large and self._can_leave(node, _uses(self.placeholders[node.name]))

    def has_known_sizes(self, node: fx.Node) -> bool:
        """Tell whether the backward graph can say how a value is laid out."""
        value = node.meta["val"]
        return can_compute([*value.shape, *value.stride()], self.symbols)

    def _can_leave(self, made: fx.Node, uses: list[fx.Node]) -> bool:
        value = made.meta["val"]
        if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_quantized:
            return False
        if value.device.type not in ("cpu", "cuda") or not is_non_overlapping_and_dense_or_false(
            value
        ):
            return False
        if not self.has_known_sizes(made):
            return False
        if any(use.op == "output" for use in uses):
            return False  # a gradient that is the saved tensor itself
        return not any(map(_writes, (*_uses(memory_of(made)), *uses)))

    def _recipe(self, node: fx.Node, handed: set[fx.Node]) -> _Found | None:
        """Return what makes a value again, and what it is made from; None if nothing may."""
        search = _Search(self, node, handed)
        if not search.make(node):
            return None
        nodes = tuple(search.nodes)
        given = self.placeholders[node.name]
        if not self.rules.is_exact(memory_of(node)) and not self._is_read_alone(given):
            return None
        if any(map(self._is_special, nodes)) and not _is_repeatable(node):
            return None
        return _Found(nodes, tuple(search.sources), tuple(search.parameters))

    def can_run_again(self, node: fx.Node) -> bool:
        """Tell whether an operation gives the same bits in the backward graph."""
        return node.op == "call_function" and (
            self.rules.is_exact(node) or self._rounds_alike(node)
        )

    def _runs_alone(self, node: fx.Node) -> bool:
        return self.rules.runs_alone is not None and self.rules.runs_alone(node)

    def _is_special(self, node: fx.Node) -> bool:
        """Tell whether the bits of an operation depend on where a compiler puts what it makes."""
        return self._runs_alone(node) or self._rounds_alike(node)

    def _rounds_alike(self, node: fx.Node) -> bool:
        """Tell whether generated code rounds a result of fused operations the same everywhere.

        They begin with what lies in memory, what is rounded lies there, and what is rounded on the
        way nobody else reads: else it might be read rounded in one place, and not in another.
        """
        rule = self.rules.rounds_alike
        if self._converts_a_parameter(node):
            return True
        if rule is None or not rule(node) or not is_tensor(node):
            return False
        is_single = node.meta["val"].dtype.itemsize >= torch.float32.itemsize
        if not is_single and len(node.users) != 1 and not self._is_read_alone(node):
            return False
        bases = map(memory_of, node.all_input_nodes)
        return all(
            base.op == "placeholder" or self._runs_alone(base) or self._rounds_alike(base)
            for base in bases
        )

    def _converts_a_parameter(self, node: fx.Node) -> bool:
        """Tell whether a node is what products alone read of a parameter, in another type."""
        return (
            self.rules.runs_alone is not None
            and _is_conversion(node)
            and memory_of(node.all_input_nodes[0]) in self.static
            and self._is_read_alone(node)
        )

    def _is_read_alone(self, node: fx.Node) -> bool:
        """Tell whether only operations that are not fused read a value, or views of it."""
        readers = [use for use in _uses(node) if source_of(use) is None and use.op != "output"]
        return bool(readers) and all(map(self._runs_alone, readers))

    def lies_in_memory(self, node: fx.Node) -> bool:
        """Tell whether a value that is not handed over is in memory anyway, as handed over.

        It is where products alone read it: fused operations would read what is not rounded yet.
        """
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            return False
        if not is_tensor(node) or source_of(node) is not None or target.overloadpacket in MOVES:
            return False
        if node in self.seen_outside or nbytes_of(node.meta["val"]) < max(self.rules.min_bytes, 1):
            return False
        readers = [use for use in _uses(node) if source_of(use) is None]
        if not readers or not all(is_product(one) and self._runs_alone(one) for one in readers):
            return False
        return _is_plain(node.meta["val"]) and self._can_leave(node, [])

    # --- what is done -----------------------------------------------------------------------

    def apply(self, values: list[_Value], budget: Budget) -> Graph:
        """Change both graphs for a budget."""
        seconds = [self._seconds_of(node) for node in self.nodes]
        forward = None
        if self.machine.hides:
            forward = sum(map(self._seconds_of, self.forward.graph.nodes))
        saved = [value.saved for value in values]
        chosen = schedule(saved, seconds, self.machine.costs, forward, latency=self.machine.latency)
        if type(budget) is int and budget < chosen.least:
            raise UsageError(
                f"budget is {format_size(budget)}, but a compiled graph needs "
                f"{format_size(chosen.least)} ({chosen.least} bytes) of saved tensors on the "
                "device at once, which is the least possible; raise it, or pass budget='least'"
            )
        in_runs = type(budget) is int or budget == "fit"
        count = _count(budget, chosen, saved, is_loss=self.returns_a_loss)
        draft = chosen.draft(count, in_runs=in_runs)
        decisions = list(draft.decisions)
        self._drop(values, draft)
        self._offload(values, draft)
        self._compute_again(values, decisions, draft)
        self._drop_lent()
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()
        ranks = {number: rank for rank, number in enumerate(chosen.order)} if in_runs else {}
        ranks = {n: rank for n, rank in ranks.items() if isinstance(decisions[n], Offload)}
        peak = chosen.peaks[0 if in_runs else count]
        plan = _plan(values, draft, peak, forward or 0.0, self.machine)
        order = sorted(_offloaded(draft), key=lambda n: (draft.first_uses[n], n))
        early = tuple(n for n in order if not any(seconds[: draft.fetches[n]]))
        return Graph(plan, chosen, ranks, early, order[-1] if order else None)

    def _drop(self, values: list[_Value], draft: Draft) -> None:
        """Hand over no more what nothing is computed from."""
        dropped = [v for v, handed in zip(values, draft.is_handed, strict=True) if not handed]
        for value in dropped:
            self.backward.graph.erase_node(value.given)
        self._drop_results(dropped)

    def _drop_lent(self) -> None:
        """Hand over no parameter that nothing is computed with after all."""
        unused = {given.name for given in self.lent.values() if not given.users}
        tokens = [one for one in self.results if isinstance(one, fx.Node) and one.name in unused]
        for given in [one for one in self.lent.values() if not one.users]:
            self.backward.graph.erase_node(given)
        drop_results(self.output, {self._place(token) for token in tokens})
        self.results = list(self.output.args[0])
        for token in tokens:
            self.forward.graph.erase_node(token)

    def _drop_results(self, values: list[_Value]) -> None:
        drop_results(self.output, {self._place(value.made) for value in values})
        self.results = list(self.output.args[0])

    def _place(self, made: fx.Node) -> int:
        """Return where a value is handed over, among the forward graph's results."""
        return self.results.index(made, self.first_handed)

    def _offload(self, values: list[_Value], chosen: Draft) -> None:
        offloaded = _offloaded(chosen)
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
        self.results[self._place(value.made)] = token
        self.output.update_arg(0, tuple(self.results))

    def _fetch(self, value: _Value, position: int) -> fx.Node:
        graph = self.backward.graph
        with graph.inserting_before(self._at(position)):
            begun = graph.call_function(FETCH, (value.given,))
        _describe(begun, _token_like(value.made))
        return begun

    def _wait(self, value: _Value, position: int, begun: list[fx.Node]) -> fx.Node:
        given = value.given
        users = [user for user in given.users if user.target is not FETCH]
        with self.backward.graph.inserting_before(self._at(position)):
            came = self._come(given, value.made.meta["val"], begun)
        for user in users:
            user.replace_input_with(given, came)
        _describe(given, _token_like(value.made))
        return came

    def _come(self, token: fx.Node, val: torch.Tensor, begun: list[fx.Node]) -> fx.Node:
        """Wait, where nodes are inserted, for what a token stands for, which is like `val`."""
        graph = self.backward.graph
        size = [computed(one, graph, self.symbols) for one in val.shape]
        stride = [computed(one, graph, self.symbols) for one in val.stride()]
        came = graph.call_function(WAIT, (token, begun, size, stride, val.dtype, val.device))
        _describe(came, val)
        return came

    def _compute_again(
        self, values: list[_Value], decisions: list[Decision], chosen: Draft
    ) -> None:
        """Copy what makes values again into the backward graph, those first that are used first."""
        again = [n for n, one in enumerate(decisions) if isinstance(one, Replay)]
        here = {value.made: self._present(value) for value in values}
        for number in sorted(again, key=lambda n: (chosen.first_uses[n], n)):
            self._copy_recipe(values[number], chosen.first_uses[number], here)
        if again:
            self._drop_results([values[number] for number in again])
            self.forward.graph.eliminate_dead_code()
        for number in again:
            if any(map(self._is_special, values[number].recipe)) and values[number].made.users:
                _see(values[number].made)

    def _copy_recipe(self, value: _Value, position: int, here: dict[fx.Node, fx.Node]) -> None:
        graph = self.backward.graph
        copies: dict[fx.Node, fx.Node] = {}

        def there(node: fx.Node) -> fx.Node:
            if node in copies:
                return copies[node]
            if node in here:
                return here[node]
            if node in self.lent:
                here[node] = self._come(self.lent[node], node.meta["val"], [])
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
        for node in value.recipe:
            if is_tensor(node) and self._runs_alone(node):
                _see(copies[node])
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


def _offloaded(draft: Draft) -> list[int]:
    both = zip(draft.decisions, draft.is_handed, strict=True)
    return [n for n, (one, handed) in enumerate(both) if isinstance(one, Offload) and handed]


def _see(node: fx.Node) -> None:
    """Have a compiler make a value as if it were handed over: by itself, and in memory."""
    with node.graph.inserting_after(node):
        seen = node.graph.call_function(SEEN, (node,))
    seen.meta["val"] = None
    if "autograd_backward" in node.meta:
        seen.meta["autograd_backward"] = True


def _count(budget: Budget, chosen: Schedule, saved: Sequence[Saved], *, is_loss: bool) -> int:
    """Return how many values a budget keeps, or may keep in a run that has all of it.

    What adds nothing to a graph's own peak is kept below the least only where the graph returns a
    loss, and its backward pass so comes next: blocks would all keep the same, one beside the other.
    """
    if budget == "fit":
        return len(chosen.order)
    if type(budget) is int:
        return chosen.fitting(budget)
    share = budget if isinstance(budget, float) else 0.0
    allowed = int(share * sum(one.nbytes for one in saved if not one.is_only_a_source))
    if allowed < chosen.least and not is_loss:
        return 0
    return chosen.fitting(max(allowed, chosen.least))


def _plan(values: list[_Value], draft: Draft, peak: int, forward: float, machine: Machine) -> Plan:
    rows, costs = [], machine.costs
    for value, decision, is_handed in zip(values, draft.decisions, draft.is_handed, strict=True):
        saved, val = value.saved, value.made.meta["val"]
        if not is_handed:
            continue
        name, reason, cost = "keep", decision.reason if isinstance(decision, Keep) else "", 0.0
        if isinstance(decision, Offload):
            name, reason = "offload", "shipped"
            if saved.is_only_a_source:
                reason = "others are computed again from it"
            cost = saved.nbytes * costs.link / saved.ratio
        elif isinstance(decision, Replay):
            assert saved.recipe is not None
            name, reason, cost = "replay", "computed sooner than shipped", saved.recipe.seconds
            if max(cost, costs.replay_floor) > saved.nbytes * costs.shipping + costs.ship_floor:
                reason = "the link is full"
        shape = tuple(map(int, val.shape)) if not free_symbols(val) else ()
        operation = str(value.made.target)
        rows.append(Row(operation, shape, val.dtype, saved.nbytes, name, reason, cost))
    return Plan(
        tuple(rows), peak, draft.link_seconds, draft.replay_seconds, forward, draft.stall_seconds
    )


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


def _changed(inputs: Iterable[fx.Node], output: fx.Node) -> set[fx.Node]:
    """Return which of a forward graph's inputs it changes, or has changed when it has run."""
    returned = output.meta.get("desc") or ()
    later = [one.mutated_input for one in returned if isinstance(one, InputMutationAOTOutput)]
    return {n for n in inputs if n.meta.get("desc") in later or any(map(_writes, _uses(n)))}


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
    """Tell whether a value may be the result of a kernel that is run again.

    Of several results only the first is large: each would be a run of its own.
    """
    if node.target is operator.getitem:
        return bool(node.args[1] == 0)
    return bool(node.meta["val"].is_contiguous())


def _is_conversion(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket in (
        aten._to_copy,
        torch.ops.prims.convert_element_type,
    )


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
