"""Puts a plan into a pair of graphs: stores, fetches, waits, and recomputed operations.

PyTorch's own partitioner first decides which values the forward graph saves. So the results can be
compared with those of a graph without offload. Large values that may be offloaded are then kept,
offloaded or recomputed: `handover.py` says which may be offloaded, `recipes.py` how a value is
recomputed. Inputs of a recipe that would not be saved are saved besides, where they are smaller
than the recomputed values.

A value is stored right where it has been made. A compiler cannot reuse its memory before the store,
and frees it after its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from storm_client.compile.costs import seconds_of
from storm_client.compile.estimates import Draft, Recipe, Saved
from storm_client.compile.handover import Handover, Rules, uses
from storm_client.compile.operators import FETCH, HOLD, STORE, WAIT, describe, see, token_like
from storm_client.compile.planned import Value, plan_of
from storm_client.compile.recipes import Found, Recipes, turned_back
from storm_client.compile.schedule import Schedule, schedule
from storm_client.compile.shared_budget import WHOLE, Part
from storm_client.compile.symbols import computed
from storm_client.compile.target import Graph
from storm_client.compile.views import (
    drop_results,
    hand_over,
    hand_over_bases,
    is_tensor,
    memory_of,
    nbytes_of,
)
from storm_client.errors import UsageError
from storm_client.planner.decisions import Offload, Replay
from storm_client.planner.in_flight import last_bytes
from storm_client.planner.machine import expected_ratio, machine_of
from stormd.protocol import Budget
from stormd.protocol.sizes import format_apart

__all__ = ["NUMBER", "Partitioner", "divided"]

NUMBER = "stormd_number"
"""The `meta` key of a wait's node for the number of the value that it waits for."""


class Partitioner:
    """Partitions joint graphs for a budget, or part of one; `found` gets what their runs need."""

    def __init__(self, rules: Rules, budget: Budget, part: Part = WHOLE) -> None:
        """Start without any graphs."""
        self.rules, self.budget, self.part = rules, budget, part
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
        """Return the forward and the backward graph.

        Raises:
            UsageError: as `divided`.
        """
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
                self.part,
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
    part: Part = WHOLE,
    *,
    outputs: int,
    static: list[int],
) -> Graph:
    """Put a plan into a pair of graphs, in place; return what their runs need to know.

    The forward graph's results from index `outputs` on are the backward graph's first inputs.
    `static` are the indices of the forward graph's inputs that live longer than it does.

    Raises:
        UsageError: the budget is below the least possible, which the message names.
    """
    hand_over_bases(forward, backward, outputs)
    pair = _Pair(forward, backward, outputs, Handover(forward, backward, outputs, static, rules))
    return pair.apply(pair.values(), budget, part)


class _Pair:
    """A forward graph and its backward graph, which are modified in place."""

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, there: Handover
    ) -> None:
        """Begin with the saved values: the forward graph's results after the first `outputs`."""
        self.forward, self.backward, self.there = forward, backward, there
        self.recipes = Recipes(there)
        (self.output,) = forward.graph.find_nodes(op="output")
        self.first_handed = outputs
        self.nodes: list[fx.Node] = list(backward.graph.nodes)
        self.positions = {node: index for index, node in enumerate(self.nodes)}
        self.lent: dict[fx.Node, fx.Node] = {}
        """Placeholders for the tokens of the parameters from which values are recomputed."""
        devices = [n.meta["val"].device for n in there.handed if is_tensor(n)]
        self.machine = machine_of(_most_common(devices))

    @property
    def results(self) -> list[Any]:
        """The present results of the forward graph."""
        return list(self.output.args[0])

    # --- the saved values -------------------------------------------------------------------

    def values(self) -> list[Value]:
        """Return the saved values that take memory, and those that a plan may save besides."""
        order = {node: index for index, node in enumerate(self.forward.graph.nodes)}
        handed = self.there.tensors()
        leaving = {node for node in handed if self.there.may_leave(node)}
        recipes = {node: self.recipes.find(node, handed) for node in leaving}
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
                Value(
                    node,
                    self.there.placeholders[node.name],
                    memory_of(node) in self.there.seen_outside,
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
        can_leave: bool,
    ) -> Saved:
        val = node.meta["val"]
        nbytes, ratio = nbytes_of(val), expected_ratio(val.dtype, self.there.rules.codec)
        users = uses(self.there.placeholders[node.name])
        if not users and can_leave:
            return Saved.only_a_source(nbytes, made=made, ratio=ratio)
        at = [self.positions[use] for use in users] or [0]
        how = None
        if recipe is not None:
            sources = tuple(sorted(numbers[one] for one in recipe.sources if one in numbers))
            how = Recipe(sum(map(self._seconds_of, recipe.nodes)), sources)
        return Saved(nbytes, min(at), max(at), can_leave, how, made, ratio)

    def _seconds_of(self, node: fx.Node) -> float:
        return seconds_of(node, self.machine, is_fused=self.there.rules.runs_alone is not None)

    def _link_seconds_of(self, node: fx.Node) -> float:
        """Return for how many seconds of a node's time the link can transfer."""
        return min(self._seconds_of(node), self.machine.longest_beside)

    def _seconds_made(self) -> dict[fx.Node, float]:
        """Return when each forward node has run, counted in seconds that the link can use."""
        nodes = list(self.forward.graph.nodes)
        return dict(zip(nodes, accumulate(map(self._link_seconds_of, nodes)), strict=True))

    def _hand_over(self, besides: list[fx.Node]) -> None:
        """Save values from which others may be recomputed, in front of the other saved values."""
        for node in reversed(besides):
            given = hand_over(node, self.forward, self.backward, self.first_handed)
            self.there.placeholders[node.name] = given

    def _lend(self, parameters: list[fx.Node]) -> None:
        """Save tokens for parameters as they are now; the model's may get other data later."""
        for node in parameters:
            behind = self.forward.graph.find_nodes(op="placeholder")[-1]
            with self.forward.graph.inserting_after(behind):
                token = self.forward.graph.call_function(HOLD, (node,))
            describe(token, token_like(node))
            self.lent[node] = hand_over(token, self.forward, self.backward, self.first_handed)

    # --- changing the graphs ----------------------------------------------------------------

    def apply(self, values: list[Value], budget: Budget, part: Part) -> Graph:
        """Change both graphs for a budget, or for that part of a budget in bytes."""
        seconds = [self._link_seconds_of(node) for node in self.nodes]
        forward, window = 0.0, None
        if self.machine.hides:
            forward = sum(map(self._seconds_of, self.forward.graph.nodes))
            window = sum(map(self._link_seconds_of, self.forward.graph.nodes))
        saved = [value.saved for value in values]
        chosen = schedule(saved, seconds, self.machine, window)
        if type(budget) is int and budget < chosen.least:
            given, needed = format_apart(budget, chosen.least)
            raise UsageError(
                f"budget is {given}, but a compiled graph needs {needed} ({chosen.least} bytes) "
                "of saved tensors on the device at once, which is the least possible; raise it, "
                "or pass budget='least'"
            )
        in_runs = type(budget) is int or budget == "fit"
        count = self._count(budget, chosen, saved, part)
        draft = chosen.draft(count, in_runs=in_runs)
        self._drop(values, draft)
        self._offload(values, draft)
        self._compute_again(values, draft)
        self._drop_lent()
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
        rooms = {n: draft.rooms[draft.first_uses[n]] for n in order}
        return Graph(
            plan,
            chosen,
            ranks,
            early,
            tuple(order),
            early_bytes=sum(saved[n].nbytes for n in early),
            last_fetched=last,
            room=0 if last is None else draft.rooms[draft.fetches[last]],
            rooms=rooms,
            planned=chosen.kept_bytes[count] if part.of > 1 and type(budget) is int else None,
        )

    def _count(self, budget: Budget, chosen: Schedule, saved: Sequence[Saved], part: Part) -> int:
        """Return how many values a budget keeps, or may keep in a run that has that part of it.

        If a graph returns a loss, its backward pass comes next, and a fraction is of its own peak.
        The values that were stored last would be on the device then, in flight, so as many bytes
        are kept instead. The values that other graphs keep are all on the device at the same time,
        with the memory that one backward graph needs: a model's blocks all keep the same. So for
        these the fraction also limits the kept bytes.
        """
        if budget == "fit":
            return len(chosen.order)
        if type(budget) is int:
            if part.of == 1:
                return chosen.fitting(budget)
            return chosen.holding(part.left(budget, chosen.least))
        share = budget if isinstance(budget, float) else 0.0
        total = sum(one.nbytes for one in saved if not one.is_only_a_source)
        allowed, least = int(share * total), chosen.least
        if not self.there.returns_a_loss:
            return min(chosen.fitting(max(allowed, least)), chosen.holding(allowed))
        in_flight = last_bytes(total) if self.machine.hides else 0
        return chosen.fitting(max(allowed, least + in_flight))

    def _drop(self, values: list[Value], draft: Draft) -> None:
        """Stop saving values from which nothing is computed."""
        dropped = [v for v, handed in zip(values, draft.is_handed, strict=True) if not handed]
        for value in dropped:
            self.backward.graph.erase_node(value.given)
        self._drop_results(dropped)

    def _drop_lent(self) -> None:
        """Stop saving parameters from which nothing is recomputed after all."""
        unused = {given.name for given in self.lent.values() if not given.users}
        tokens = [one for one in self.results if isinstance(one, fx.Node) and one.name in unused]
        for given in [one for one in self.lent.values() if not one.users]:
            self.backward.graph.erase_node(given)
        drop_results(self.output, {self._place(token) for token in tokens})
        for token in tokens:
            self.forward.graph.erase_node(token)

    def _drop_results(self, values: list[Value]) -> None:
        drop_results(self.output, {self._place(value.made) for value in values})

    def _place(self, made: fx.Node) -> int:
        """Return a saved value's index among the forward graph's results."""
        return self.results.index(made, self.first_handed)

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
            came = self._wait(values[number], use, list(begun.values()))
            came.meta[NUMBER] = number
            begun = {n: node for n, node in begun.items() if n != number}

    def _store(self, value: Value, number: int) -> None:
        graph, made = self.forward.graph, value.made
        behind = made
        if made.op == "placeholder":
            behind = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(behind):
            token = graph.call_function(STORE, (made, number, value.is_lent))
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
            came = self._come(given, value.made.meta["val"], begun)
        for user in users:
            user.replace_input_with(given, came)
        describe(given, token_like(value.made))
        return came

    def _come(self, token: fx.Node, val: torch.Tensor, begun: list[fx.Node]) -> fx.Node:
        """Insert a wait for the value of a token, which is like `val`."""
        graph = self.backward.graph
        size = [computed(one, graph, self.there.symbols) for one in val.shape]
        stride = [computed(one, graph, self.there.symbols) for one in val.stride()]
        came = graph.call_function(WAIT, (token, begun, size, stride, val.dtype, val.device))
        describe(came, val)
        return came

    def _compute_again(self, values: list[Value], chosen: Draft) -> None:
        """Copy the recipes of recomputed values into the backward graph, in order of first use."""
        again = [n for n, one in enumerate(chosen.decisions) if isinstance(one, Replay)]
        here = {value.made: self._present(value) for value in values}
        for number in sorted(again, key=lambda n: (chosen.first_uses[n], n)):
            self._copy_recipe(values[number], chosen.first_uses[number], here)
        if again:
            self._drop_results([values[number] for number in again])
            self.forward.graph.eliminate_dead_code()
        if self.there.rules.runs_alone is None:
            return
        for made in (values[number].made for number in again):
            if made.users:
                see(made)

    def _copy_recipe(self, value: Value, position: int, here: dict[fx.Node, fx.Node]) -> None:
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
            if node.name in self.there.placeholders:
                return self.there.placeholders[node.name]
            view: fx.Node = self.recipes.turned[node]
            back = turned_back(view)
            assert back is not None
            copies[node] = graph.call_function(back[0], (there(view), *back[1]))
            copies[node].meta["val"] = node.meta["val"]
            return copies[node]

        with graph.inserting_before(self._at(position)):
            for node in value.recipe:
                copies[node] = graph.node_copy(node, there)
                copies[node].meta["autograd_backward"] = True
        made = copies[value.made]
        for node in value.recipe:
            if is_tensor(node) and self._is_seen(node, value):
                see(copies[node])
        value.given.replace_all_uses_with(made)
        graph.erase_node(value.given)
        here[value.made] = made

    def _is_seen(self, node: fx.Node, value: Value) -> bool:
        """Return whether a recipe's node must be computed on its own in the backward graph.

        The value itself must be, as it was in memory. Loops that read its sources instead would be
        split and fused differently, and would round differently.
        """
        if self.there.rules.runs_alone is None:
            return False
        return node is value.made or self.recipes.runs_alone(node)

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
