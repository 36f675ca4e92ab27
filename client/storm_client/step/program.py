"""The graphs of a captured step, and the order in which they run.

    forward and backward graph                   of the first micro-batch and all before the loop
    forward and backward graph, n - 1 times      of each further micro-batch
    a graph of the operations after the loop
    the late graph                               changes the state

What only Python computes of a part's results, such as a sum of `.item()`, is a graph behind the
part. Each of the first two pairs is split where the most bytes are live. The planner of compiled
models keeps, offloads or recomputes the values that are live there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.debugging import boxed_nop

from storm_client.compile.exactness import exact_in_eager, exact_in_generated_code
from storm_client.compile.graph import Graph
from storm_client.compile.partition import divided
from storm_client.compile.runtime import running
from storm_client.compile.saved_values import Rules
from storm_client.compile.shared_budget import WHOLE
from storm_client.compile.target import Target
from storm_client.step.captured import Captured
from storm_client.step.nodes import MICRO_BATCH, memories, reads, writes, written_by
from storm_client.step.passes import (
    BODY,
    Ordered,
    is_number,
    numbers_at_the_end,
    ordered,
    without_repeats,
)
from storm_client.step.strides import with_recorded_strides
from storm_client.step.temporaries import Lifetimes, Temporary, peak_of

__all__ = ["GENERATORS", "Call", "Program", "program_of"]


@dataclass
class Call:
    """One graph of a step, and how it runs."""

    module: fx.GraphModule
    run: Callable[[list[Any]], Sequence[Any]]
    inputs: list[fx.Node]
    results: list[fx.Node]
    graph: Graph | None = None
    """The plan of a forward graph that has one."""
    takes_saved: bool = False
    """Whether its first inputs are the values that the previous call returned after its results."""
    drops: list[fx.Node] = field(default_factory=list)
    """Inputs that no later call reads."""


@dataclass
class Program:
    """All graphs of a step."""

    captured: Captured
    ordered: Ordered
    once: list[Call]
    body: list[Call]
    after: list[Call]
    late: Call

    @property
    def calls(self) -> list[Call]:
        """All calls in their order; those of the loop appear once."""
        return [*self.once, *self.body, *self.after, self.late]

    @property
    def graphs(self) -> list[Graph]:
        """The plans of all calls that have one."""
        return [call.graph for call in self.calls if call.graph is not None]

    def temporaries(self) -> list[Temporary]:
        """Return the storages that the graphs create, in the order of creation."""
        lifetimes = Lifetimes()
        for call in self.calls:
            lifetimes.run(call.module.graph.nodes)
        lifetimes.keep(node for node in self.ordered.results if node is not None)
        return lifetimes.found()

    def work(self, values: dict[fx.Node, Any], target: Target) -> None:
        """Run all calls that change no state; `values` has the inputs, and gets the results."""
        loop = self.captured.loop
        self._divide(values, 0)
        _run(self.once, values, target)
        for number in range(1, loop.count):
            self._divide(values, number)
            for carry in self.ordered.carries:
                made = carry.first if number == 1 else carry.made
                values[carry.given] = values[made]
            _run(self.body, values, target)
        _run(self.after, values, target)

    def _divide(self, values: dict[fx.Node, Any], number: int) -> None:
        loop = self.captured.loop
        if not loop.count:
            return
        for leaf, part in zip(loop.leaves, loop.slices[min(number, 1)], strict=True):
            rows = values[leaf].shape[0] // loop.count
            values[part] = values[leaf].narrow(0, number * rows, rows)


def _run(calls: Iterable[Call], values: dict[fx.Node, Any], target: Target) -> None:
    saved: Sequence[Any] = ()
    for call in calls:
        given = [*(saved if call.takes_saved else ()), *(values[node] for node in call.inputs)]
        saved = ()
        for node in call.drops:
            del values[node]
        with nullcontext() if call.graph is None else running(target, call.graph):
            made = call.run(given)
        count = len(call.results)
        values.update(zip(call.results, made[:count], strict=True))
        saved = made[count:]
        del made


def _by_pytorch(module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    made: Callable[[list[Any]], Sequence[Any]] = boxed_nop(module, [])
    return made


def _by_inductor(module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Generate code of a graph, unless it has numbers: generated code would hold their values.

    It does if a step updates its parameters before its last forward pass, or computes tensors with
    a result of `.item()`.
    """
    taken = any(node.meta["val"] is None for node in module.graph.find_nodes(op="placeholder"))
    if taken or any(map(is_number, module.graph.nodes)):
        return _by_pytorch(module)
    from storm_client.compile.inductor import generate_inference  # loads Inductor

    return generate_inference(with_recorded_strides(module))


GENERATORS = {
    "inductor": (_by_inductor, exact_in_generated_code),
    "eager": (_by_pytorch, exact_in_eager),
}
"""For each `codegen`: a function that turns a graph into one of its inputs in a list, which it
empties; and which operations have the same bits wherever the generated code runs them."""


def program_of(captured: Captured, codegen: str, target: Target) -> Program:
    """Return the graphs of a captured step, planned for a target's budget.

    Raises:
        UsageError: the budget is below the least possible in the first capture of a step, or the
            micro-batches cannot run as a loop.
    """
    return _Builder(captured, codegen, target).program()


class _Builder:
    """Builds the graphs of a step from its ordered nodes."""

    def __init__(self, captured: Captured, codegen: str, target: Target) -> None:
        self.captured, self.found, self.budget = captured, ordered(captured), target.budget
        self.share = WHOLE._replace(is_training=bool(target.graphs))
        self.measured = target.measured
        self.generate, exact = GENERATORS[codegen]
        touched = written_by(self.found.work)

        def is_exact(node: fx.Node) -> bool:
            return exact(node) and not (memories(node) | reads(node)) & touched

        self.rules = Rules(target.min_bytes, target.codec, is_exact)

    def program(self) -> Program:
        """Return all graphs."""
        found = self.found
        once = [node for node in found.work if node.meta[MICRO_BATCH] in (0, 1)]
        body, after = found.of_micro_batch(BODY), found.of_micro_batch(-1)
        read_after = _read_by([*after, *found.late])
        once_calls = self._before_numbers(once, read_after | _read_by(body), self._pair)
        body_calls = self._before_numbers(body, read_after, self._pair)
        after_calls = self._before_numbers(after, _read_by(found.late), self._whole)
        late = self._single(found.late, set(), _by_pytorch)
        program = Program(self.captured, found, once_calls, body_calls, after_calls, late)
        self._drop(program)
        return program

    def _before_numbers(
        self,
        nodes: list[fx.Node],
        later: set[fx.Node],
        calls_of: Callable[[list[fx.Node], set[fx.Node]], list[Call]],
    ) -> list[Call]:
        """Return a part's calls, and one more for the numbers that the part does not use itself."""
        numbers = numbers_at_the_end(nodes)
        rest = [node for node in nodes if node not in numbers]
        calls = calls_of(rest, later | _read_by(numbers)) if rest else []
        return [*calls, self._single(numbers, later, _by_pytorch)] if numbers else calls

    def _whole(self, nodes: list[fx.Node], later: set[fx.Node]) -> list[Call]:
        return [self._single(without_repeats(nodes, self.found), later, self.generate)]

    def _pair(self, nodes: list[fx.Node], later: set[fx.Node]) -> list[Call]:
        """Return a part's calls: split where most bytes are live, each half without repeats."""
        wanted = self._wanted() | later
        at = peak_of(nodes, [node for node in nodes if node in wanted])
        while at < len(nodes) and nodes[at].target is operator.getitem:
            at += 1  # it selects a result of the operation before it
        first = without_repeats(nodes[:at], self.found)
        second = without_repeats(nodes[at:], self.found)
        results = [node for node in first if node in wanted]
        recomputed, saved = _saved_between(first, second)
        forward = _graph(first, [*results, *saved])
        inputs = _inputs(first)
        given = _inputs([*recomputed, *second], skip=saved)
        given += [node for node in inputs if node not in given]
        second_results = [node for node in second if node in wanted]
        copies = _copies_of(first, written_by(second))
        kept = [node for node in saved if node in copies]  # the planner keeps what is returned
        named = {node.name: node for node in forward.graph.nodes}
        takes = [*((node, named[node.name]) for node in saved), *((one, one) for one in given)]
        backward = _graph([*recomputed, *second], [*second_results, *kept], takes)
        graph = None
        if saved:
            static = self._static(forward)
            graph = divided(
                forward,
                backward,
                self.rules,
                self.budget,
                self.share,
                measured=self.measured,
                outputs=len(results),
                static=static,
            )
        calls = [Call(forward, self.generate(forward), inputs, results, graph)]
        if second:
            run = self.generate(backward)
            calls.append(Call(backward, run, given, second_results, takes_saved=True))
        return calls

    def _single(
        self,
        nodes: list[fx.Node],
        later: set[fx.Node],
        generate: Callable[[fx.GraphModule], Callable[[list[Any]], Sequence[Any]]],
    ) -> Call:
        wanted = self._wanted() | later
        results = [node for node in nodes if node in wanted]
        module = _graph(nodes, results)
        return Call(module, generate(module), _inputs(nodes), results)

    def _wanted(self) -> set[fx.Node]:
        """Return the nodes of results, side effects, and values passed between micro-batches."""
        found = {one for one in self.found.results if one is not None}
        for carry in self.found.carries:
            found |= {carry.first, carry.made}
        return found

    def _static(self, forward: fx.GraphModule) -> list[int]:
        """Return the indices of a graph's inputs that live between steps."""
        outside = self.captured.recording.outside.values()
        held = {one.node.name for one in outside if one.argument is None}
        inputs = [
            node
            for node in forward.graph.find_nodes(op="placeholder")
            if str(node.target).startswith("primals")
        ]
        return [index for index, node in enumerate(inputs) if node.name in held]

    def _drop(self, program: Program) -> None:
        """Let the last call that reads a value drop it."""
        last = {node: call for call in program.calls for node in call.inputs}
        made = {node for call in program.calls for node in call.results}
        of_body = {node for call in program.body for node in call.results}
        in_loop = {id(call) for call in program.body}
        for node, call in last.items():
            is_read_again = id(call) in in_loop and node not in of_body
            if node in made and node not in self._wanted() and not is_read_again:
                call.drops.append(node)


def _read_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that some nodes read."""
    return {source for node in nodes for source in node.all_input_nodes}


def _saved_between(
    first: Sequence[fx.Node], second: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the first half's views that the second recomputes, and the values that it gets."""
    there = set(first)
    recomputed: dict[fx.Node, None] = {}
    saved: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node not in there or node in recomputed or node in saved:
            return
        if _is_view(node):
            for source in node.all_input_nodes:
                visit(source)
            recomputed[node] = None
        else:
            saved[node] = None

    for node in second:
        for source in node.all_input_nodes:
            visit(source)
    return list(recomputed), list(saved)


def _copies_of(nodes: Iterable[fx.Node], written: Set[int]) -> set[fx.Node]:
    """Return the nodes that may only copy memory that is written to after them.

    A compiler leaves such a copy out, unless the graph returns it. The store would then get the
    memory itself.
    """
    found, memory = set[fx.Node](), set(written)
    for node in nodes:
        sources = node.all_input_nodes
        if reads(node) & memory and len(sources) == 1 and _extent(node) == _extent(sources[0]):
            found.add(node)
            memory |= memories(node)
    return found


def _extent(node: fx.Node) -> tuple[torch.dtype, int] | None:
    val = node.meta.get("val")
    return (val.dtype, val.numel()) if isinstance(val, torch.Tensor) else None


def _is_view(node: fx.Node) -> bool:
    """Return whether a node only returns views of its arguments, and has no other effect."""
    target = node.target
    if target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return bool(memories(node)) and memories(node) <= reads(node) and not writes(node)


def _inputs(nodes: Sequence[fx.Node], skip: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """Return the nodes that some nodes read, apart from these nodes and `skip`."""
    there = {*nodes, *skip}
    read = (one for node in nodes for one in node.all_input_nodes)
    return list(dict.fromkeys(one for one in read if one not in there))


def _graph(
    nodes: Sequence[fx.Node],
    results: Sequence[fx.Node],
    given: Sequence[tuple[fx.Node, fx.Node]] | None = None,
) -> fx.GraphModule:
    """Return a graph of some nodes.

    Its placeholders are the nodes' inputs, or those in `given`, each with the node whose name it
    takes.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, named in given if given is not None else [(one, one) for one in _inputs(nodes)]:
        copies[node] = graph.placeholder(named.name)
        copies[node].meta.update(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[one] for one in results))
    output.meta["val"] = None
    return fx.GraphModule(torch.nn.Module(), graph)
