"""Puts a plan into a pair of graphs: stores, fetches, waits, and recomputed operations.

PyTorch's own partitioner first decides which values the forward graph saves. So the results can be
compared with those of a graph without offload. Large values that may be offloaded are then kept,
offloaded or recomputed: `saved_values.py` says which may be offloaded, `recipes.py` how a value is
recomputed. Inputs of a recipe that would not be saved are saved besides, where they are smaller
than the recomputed values.

A value is stored right where it has been made. A compiler cannot reuse its memory before the store,
and frees it after its last use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from storm_client.compile.costs import seconds_of
from storm_client.compile.estimates import Draft, Recipe, Saved
from storm_client.compile.graph import Graph
from storm_client.compile.operators import (
    FETCH,
    HOLD,
    STORE,
    WAIT,
    describe,
    materialize,
    token_like,
)
from storm_client.compile.planned import Value, plan_of
from storm_client.compile.recipes import Found, Recipes, inverse_permutation
from storm_client.compile.saved_values import Rules, SavedValues, uses
from storm_client.compile.schedule import Schedule, schedule
from storm_client.compile.shared_budget import WHOLE, BudgetShare
from storm_client.compile.symbols import computed
from storm_client.compile.views import (
    add_saved,
    drop_results,
    is_tensor,
    memory_of,
    nbytes_of,
    save_bases,
)
from storm_client.errors import UsageError
from storm_client.planner.decisions import Offload, Replay
from storm_client.planner.in_flight import last_bytes
from storm_client.planner.machine import Machine, expected_ratio, machine_of
from stormd.protocol import Budget
from stormd.protocol.sizes import format_apart

__all__ = ["NUMBER", "Partitioner", "divided"]

log = logging.getLogger(__name__)

NUMBER = "stormd_number"
"""The `meta` key of a wait's node for the number of the value that it waits for."""


Measured: TypeAlias = Callable[[Machine, torch.device], Machine]
"""Returns default figures of a device with those that were measured."""


def _unmeasured(machine: Machine, _device: torch.device) -> Machine:
    return machine


class Partitioner:
    """Partitions joint graphs for a budget, or share of one; `found` gets what their runs need."""

    def __init__(
        self,
        rules: Rules,
        budget: Budget,
        share: BudgetShare = WHOLE,
        measured: Measured = _unmeasured,
    ) -> None:
        self.rules, self.budget, self.share, self.measured = rules, budget, share, measured
        self.found: list[Graph] = []

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph; raise UsageError as `divided` does."""
        forward, backward = min_cut_rematerialization_partition(
            gm,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
            **options,
        )
        self.found.append(
            divided(
                forward,
                backward,
                self.rules,
                self.budget,
                self.share,
                measured=self.measured,
                outputs=num_fwd_outputs,
                static=static_lifetime_input_indices or [],
            )
        )
        return forward, backward


def divided(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    rules: Rules,
    budget: Budget,
    share: BudgetShare = WHOLE,
    *,
    measured: Measured = _unmeasured,
    outputs: int,
    static: list[int],
) -> Graph:
    """Put a plan into a pair of graphs, in place; return what their runs need to know.

    The forward graph's results from index `outputs` on are the backward graph's first inputs.
    `static` are the indices of the forward graph's inputs that live longer than it does. The plan
    rests on the `measured` figures of the device that has most of the saved values, which are asked
    for only if there is something to offload.

    Raises:
        UsageError: the budget is below the least possible, which the message names, and training
            has not begun.
    """
    save_bases(forward, backward, outputs)
    saved = SavedValues(forward, backward, outputs, static, rules)
    device = _most_common(n.meta["val"].device for n in saved.saved if is_tensor(n))
    machine = machine_of(device)
    if any(map(saved.is_offloadable, saved.tensors())):
        machine = measured(machine, device)
    pair = _Pair(forward, backward, outputs, saved, machine)
    return pair.apply(pair.values(), budget, share)


class _Pair:
    """A forward graph and its backward graph, which are modified in place."""

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        outputs: int,
        saved: SavedValues,
        machine: Machine,
    ) -> None:
        """Begin with the saved values: the forward graph's results after the first `outputs`."""
        self.forward, self.backward, self.saved_values = forward, backward, saved
        self.rules, self.recipes = saved.rules, Recipes(saved)
        (self.output,) = forward.graph.find_nodes(op="output")
        self.first_saved = outputs
        self.nodes: list[fx.Node] = list(backward.graph.nodes)
        self.positions = {node: index for index, node in enumerate(self.nodes)}
        self.parameters: dict[fx.Node, fx.Node] = {}
        """Placeholders for the tokens of the parameters from which values are recomputed."""
        self.machine = machine

    @property
    def results(self) -> list[Any]:
        """The present results of the forward graph."""
        return list(self.output.args[0])

    # --- the saved values -------------------------------------------------------------------

    def values(self) -> list[Value]:
        """Return the saved values that take memory, and those that a plan may save besides."""
        order = {node: index for index, node in enumerate(self.forward.graph.nodes)}
        tensors = self.saved_values.tensors()
        offloadable = {node for node in tensors if self.saved_values.is_offloadable(node)}
        recipes = {node: self.recipes.find(node, tensors) for node in offloadable}
        besides = {n for one in recipes.values() if one for n in one.sources} - tensors
        parameters = {n for one in recipes.values() if one for n in one.parameters}
        self._save_besides(sorted(besides, key=order.__getitem__))
        self._save_parameters(sorted(parameters, key=order.__getitem__))
        made = self._seconds_made()
        found = sorted(tensors | besides, key=order.__getitem__)
        numbers = {node: number for number, node in enumerate(found)}
        values = []
        for node in found:
            recipe, is_offloadable = recipes.get(node), node in offloadable or node in besides
            saved = self._saved(node, recipe, numbers, made[node], is_offloadable=is_offloadable)
            values.append(
                Value(
                    node,
                    self.saved_values.placeholders[node.name],
                    memory_of(node) in self.saved_values.visible_outside,
                    saved,
                    recipe.nodes if recipe else (),
                )
            )
        return values

    def _saved(
        self,
        node: fx.Node,
        recipe: Found | None,
        numbers: dict[fx.Node, int],
        made: float,
        *,
        is_offloadable: bool,
    ) -> Saved:
        val = node.meta["val"]
        nbytes, ratio = nbytes_of(val), expected_ratio(val.dtype, self.rules.codec)
        users = uses(self.saved_values.placeholders[node.name])
        if not users and is_offloadable:
            return Saved.only_a_source(nbytes, made=made, ratio=ratio)
        at = [self.positions[use] for use in users] or [0]
        how = None
        if recipe is not None:
            sources = tuple(sorted(numbers[one] for one in recipe.sources if one in numbers))
            how = Recipe(sum(map(self._seconds_of, recipe.nodes)), sources)
        return Saved(nbytes, min(at), max(at), is_offloadable, how, made, ratio)

    def _seconds_of(self, node: fx.Node) -> float:
        return seconds_of(node, self.machine, is_fused=self.rules.is_fused)

    def _link_seconds_of(self, node: fx.Node) -> float:
        """Return for how many seconds of a node's time the link can transfer."""
        return min(self._seconds_of(node), self.machine.longest_beside)

    def _seconds_made(self) -> dict[fx.Node, float]:
        """Return when each forward node has run, counted in seconds that the link can use."""
        nodes = list(self.forward.graph.nodes)
        return dict(zip(nodes, accumulate(map(self._link_seconds_of, nodes)), strict=True))

    def _save_besides(self, besides: list[fx.Node]) -> None:
        """Save values from which others may be recomputed, in front of the other saved values."""
        for node in reversed(besides):
            given = add_saved(node, self.forward, self.backward, self.first_saved)
            self.saved_values.placeholders[node.name] = given

    def _save_parameters(self, parameters: list[fx.Node]) -> None:
        """Save tokens for parameters as they are now; the model's may get other data later."""
        for node in parameters:
            behind = self.forward.graph.find_nodes(op="placeholder")[-1]
            with self.forward.graph.inserting_after(behind):
                token = self.forward.graph.call_function(HOLD, (node,))
            describe(token, token_like(node))
            self.parameters[node] = add_saved(token, self.forward, self.backward, self.first_saved)

    # --- changing the graphs ----------------------------------------------------------------

    def apply(self, values: list[Value], budget: Budget, share: BudgetShare) -> Graph:
        """Change both graphs for a budget, or for that share of a budget in bytes.

        Raises:
            UsageError: the budget is below the least possible, and training has not begun.
        """
        seconds = [self._link_seconds_of(node) for node in self.nodes]
        forward, window = 0.0, None
        if self.machine.hides:
            forward = sum(map(self._seconds_of, self.forward.graph.nodes))
            window = sum(map(self._link_seconds_of, self.forward.graph.nodes))
        saved = [value.saved for value in values]
        chosen = schedule(saved, seconds, self.machine, window)
        if type(budget) is int and budget < chosen.least:
            given, needed = format_apart(budget, chosen.least)
            message = (
                f"budget is {given}, but a compiled graph needs {needed} ({chosen.least} bytes) "
                "of saved tensors on the device at once, which is the least possible; raise it, "
                "or pass budget='least'"
            )
            if not share.is_training:
                raise UsageError(message)
            log.warning("%s; until then this graph keeps as little as possible", message)
            budget = "least"
        in_runs = type(budget) is int or budget == "fit"
        count = self._count(budget, chosen, saved, share)
        draft = chosen.draft(count, in_runs=in_runs)
        self._drop(values, draft)
        self._offload(values, draft)
        self._recompute(values, draft)
        self._drop_parameters()
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()
        ranks = {number: rank for rank, number in enumerate(chosen.order)} if in_runs else {}
        ranks = {n: at for n, at in ranks.items() if isinstance(draft.decisions[n], Offload)}
        peak = chosen.peaks[0 if in_runs else count]
        plan = plan_of(values, draft, peak, forward, self.machine)
        order, fetched = draft.by_use(), draft.by_fetch()
        early = tuple(n for n in order if not any(seconds[: draft.fetches[n]]))
        last = fetched[-1] if fetched else None
        free_bytes_from = {n: draft.free_bytes_from[draft.first_uses[n]] for n in order}
        return Graph(
            plan,
            chosen,
            ranks,
            early,
            tuple(order),
            early_bytes=sum(saved[n].nbytes for n in early),
            last_fetched=last,
            free_bytes=0 if last is None else draft.free_bytes_from[draft.fetches[last]],
            free_bytes_from=free_bytes_from,
            planned=chosen.kept_bytes[count] if share.of > 1 and type(budget) is int else None,
        )

    def _count(
        self, budget: Budget, chosen: Schedule, saved: Sequence[Saved], share: BudgetShare
    ) -> int:
        """Return how many values a budget keeps, or may keep in a run that has that share of it.

        If a graph returns a loss, its backward pass comes next, and a fraction is of its own peak.
        The values that were stored last would be on the device then, in flight, so as many bytes
        are kept instead. The values that other graphs keep are all on the device at the same time,
        with the memory that one backward graph needs: a model's blocks all keep the same. So for
        these the fraction also limits the kept bytes.
        """
        if budget == "fit":
            return len(chosen.order)
        if type(budget) is int:
            if share.of == 1:
                return chosen.fitting(budget)
            return chosen.holding(share.left(budget, chosen.least))
        fraction = budget if isinstance(budget, float) else 0.0
        total = sum(one.nbytes for one in saved if not one.is_only_a_source)
        allowed, least = int(fraction * total), chosen.least
        if not self.saved_values.returns_a_loss:
            return min(chosen.fitting(max(allowed, least)), chosen.holding(allowed))
        in_flight = last_bytes(total) if self.machine.hides else 0
        return chosen.fitting(max(allowed, least + in_flight))

    def _drop(self, values: list[Value], draft: Draft) -> None:
        """Stop saving values from which nothing is computed."""
        dropped = [v for v, saved in zip(values, draft.is_saved, strict=True) if not saved]
        for value in dropped:
            self.backward.graph.erase_node(value.given)
        self._drop_results(dropped)

    def _drop_parameters(self) -> None:
        """Stop saving parameters from which nothing is recomputed after all."""
        unused = {given.name for given in self.parameters.values() if not given.users}
        tokens = [one for one in self.results if isinstance(one, fx.Node) and one.name in unused]
        for given in [one for one in self.parameters.values() if not one.users]:
            self.backward.graph.erase_node(given)
        drop_results(self.output, {self._place(token) for token in tokens})
        for token in tokens:
            self.forward.graph.erase_node(token)

    def _drop_results(self, values: list[Value]) -> None:
        drop_results(self.output, {self._place(value.made) for value in values})

    def _place(self, made: fx.Node) -> int:
        """Return a saved value's index among the forward graph's results."""
        return self.results.index(made, self.first_saved)

    def _offload(self, values: list[Value], chosen: Draft) -> None:
        for number in chosen.offloaded():
            self._store(values[number], number)
        begun: dict[int, fx.Node] = {}
        pending = iter(chosen.by_fetch())
        ahead = next(pending, None)
        for number in chosen.by_use():
            use = chosen.first_uses[number]
            while ahead is not None and (chosen.fetches[ahead] <= use or number not in begun):
                begun[ahead] = self._fetch(values[ahead], chosen.fetches[ahead])
                ahead = next(pending, None)
            restored = self._wait(values[number], use, list(begun.values()))
            restored.meta[NUMBER] = number
            begun = {n: node for n, node in begun.items() if n != number}

    def _store(self, value: Value, number: int) -> None:
        graph, made = self.forward.graph, value.made
        behind = made
        if made.op == "placeholder":
            behind = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(behind):
            token = graph.call_function(STORE, (made, number, value.is_shared))
        describe(token, token_like(made))
        if "saved_tensor_with_no_vc_check" in made.meta:
            token.meta["saved_tensor_with_no_vc_check"] = made.meta["saved_tensor_with_no_vc_check"]
        results = self.results
        results[self._place(value.made)] = token
        self.output.update_arg(0, tuple(results))

    def _fetch(self, value: Value, position: int) -> fx.Node:
        graph = self.backward.graph
        with graph.inserting_before(self._at(position)):
            begun = graph.call_function(FETCH, (value.given,))
        describe(begun, token_like(value.made))
        return begun

    def _wait(self, value: Value, position: int, begun: list[fx.Node]) -> fx.Node:
        given = value.given
        users = [user for user in given.users if user.target is not FETCH]
        with self.backward.graph.inserting_before(self._at(position)):
            restored = self._insert_wait(given, value.made.meta["val"], begun)
        for user in users:
            user.replace_input_with(given, restored)
        describe(given, token_like(value.made))
        return restored

    def _insert_wait(self, token: fx.Node, val: torch.Tensor, begun: list[fx.Node]) -> fx.Node:
        """Insert a wait for the value of a token, which is like `val`."""
        graph = self.backward.graph
        size = [computed(one, graph, self.saved_values.symbols) for one in val.shape]
        stride = [computed(one, graph, self.saved_values.symbols) for one in val.stride()]
        restored = graph.call_function(WAIT, (token, begun, size, stride, val.dtype, val.device))
        describe(restored, val)
        return restored

    def _recompute(self, values: list[Value], chosen: Draft) -> None:
        """Copy the recipes of recomputed values into the backward graph, in order of first use."""
        again = [n for n, one in enumerate(chosen.decisions) if isinstance(one, Replay)]
        here = {value.made: self._present(value) for value in values}
        for number in sorted(again, key=lambda n: (chosen.first_uses[n], n)):
            self._copy_recipe(values[number], chosen.first_uses[number], here)
        if again:
            graph = self.forward.graph
            effects = {node for node in graph.nodes if not node.users}  # such as checks
            self._drop_results([values[number] for number in again])
            graph.eliminate_dead_code(lambda node: node in effects or node.is_impure())
        for made in (values[number].made for number in again):
            if self.rules.is_fused and made.users:
                materialize(made)

    def _copy_recipe(self, value: Value, position: int, here: dict[fx.Node, fx.Node]) -> None:
        graph = self.backward.graph
        copies: dict[fx.Node, fx.Node] = {}

        def in_backward(node: fx.Node) -> fx.Node:
            if node in copies:
                return copies[node]
            if node in here:
                return here[node]
            if node in self.parameters:
                here[node] = self._insert_wait(self.parameters[node], node.meta["val"], [])
                return here[node]
            if node.name in self.saved_values.placeholders:
                return self.saved_values.placeholders[node.name]
            view: fx.Node = self.recipes.permuted[node]
            back = inverse_permutation(view)
            assert back is not None
            copies[node] = graph.call_function(back[0], (in_backward(view), *back[1]))
            copies[node].meta["val"] = node.meta["val"]
            return copies[node]

        with graph.inserting_before(self._at(position)):
            for node in value.recipe:
                copies[node] = graph.node_copy(node, in_backward)
                copies[node].meta["autograd_backward"] = True
        made = copies[value.made]
        for node in value.recipe:
            if is_tensor(node) and self._is_materialized(node, value):
                materialize(copies[node])
        value.given.replace_all_uses_with(made)
        graph.erase_node(value.given)
        here[value.made] = made

    def _is_materialized(self, node: fx.Node, value: Value) -> bool:
        """Return whether a recipe's node must be computed on its own in the backward graph.

        The value itself must be, as it was in memory. Loops that read its sources instead would be
        split and fused differently, and would round differently.
        """
        return self.rules.is_fused and (node is value.made or self.rules.runs_alone(node))

    def _present(self, value: Value) -> fx.Node:
        """Return the backward graph's node that has a value."""
        return next((user for user in value.given.users if user.target is WAIT), value.given)

    def _at(self, position: int) -> fx.Node:
        """Return the node before which others can be inserted: placeholders come first."""
        while self.nodes[position].op == "placeholder":
            position += 1
        return self.nodes[position]


def _most_common(devices: Iterable[torch.device]) -> torch.device:
    counted = list(devices)
    return max(counted, key=counted.count) if counted else torch.device("cpu")
