"""What a captured step is for people: its operations, its plan, and where its temporaries lie.

The figures are of memory as it is planned: each storage that the step makes, from the operation
that makes it, or begins to fetch it, to the last that uses it. What lives between steps, parameters
and the state of optimizers, is counted by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from storm_client.compile.layout import Block, Layout, bound, laid_out
from storm_client.compile.operators import FETCH, STORE, WAIT
from storm_client.planner.plan import Plan, new_figure, save_figure
from storm_client.step.nodes import memories, reads
from storm_client.step.program import Call, Program
from stormd.protocol.sizes import format_size

__all__ = ["Explanation", "Temporary", "explained", "most_at_once", "temporaries"]

ALIGNMENT_BYTES = 64
"""Where PyTorch's allocator for CPUs begins tensors, and vector instructions read fastest."""

SHOWN = 12
"""Kinds of operations that are listed by name."""


@dataclass(frozen=True, slots=True)
class Temporary:
    """A storage that a step makes: when it is needed, by the number of the operation."""

    operation: str
    begin: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class Explanation:
    """A captured step. `str()` is a summary; `draw` makes a picture of its memory."""

    operations: tuple[tuple[str, int], ...]
    """How often each is run, most frequent first; those of a loop's body once."""
    micro_batches: int
    """How often the body of the step's loop runs, 0 without one."""
    pruned: int
    folded: int
    repeated: int
    """Operations left out: what no result needs, what is constant, what was computed before."""
    inputs: int
    state: int
    outputs: int
    """Tensors that are given, that live between steps, and that are returned."""
    state_bytes: int
    plans: tuple[Plan, ...]
    temporaries: tuple[Temporary, ...]
    layout: Layout

    @property
    def separate_bytes(self) -> int:
        """Bytes of all temporaries, each in a buffer of its own."""
        return sum(one.nbytes for one in self.temporaries)

    @property
    def packed_bytes(self) -> int:
        """Bytes of one buffer that has them all, each for as long as it is needed."""
        return self.layout.nbytes

    @property
    def share(self) -> float:
        """What is packed, as a part of what is not."""
        return self.packed_bytes / self.separate_bytes if self.separate_bytes else 1.0

    def __str__(self) -> str:
        """Return the graph in short, what becomes of saved values, and bytes."""
        return "\n".join((*self._graph(), *self._plan(), *self._memory()))

    def _graph(self) -> Iterator[str]:
        total = sum(count for _, count in self.operations)
        loop = f", a loop of {self.micro_batches} micro-batches" if self.micro_batches else ""
        yield f"{total} operations{loop}; {self.inputs} inputs, {self.outputs} outputs"
        yield (
            f"left out: {self.pruned} that no result needs, {self.folded} constant, "
            f"{self.repeated} repeated"
        )
        for name, count in self.operations[:SHOWN]:
            yield f"  {count:>5} x {name}"
        rest = self.operations[SHOWN:]
        if rest:
            yield f"  {sum(count for _, count in rest):>5} of another {len(rest)} kinds"

    def _plan(self) -> Iterator[str]:
        for plan in self.plans:
            sums = ", ".join(
                f"{name} {format_size(nbytes)}" for name, nbytes in plan.bytes_by_decision.items()
            )
            yield f"saved: {sums}; at most {format_size(plan.peak_bytes)} at once"

    def _memory(self) -> Iterator[str]:
        yield f"state: {self.state} tensors, {format_size(self.state_bytes)}"
        yield (
            f"temporaries: {len(self.temporaries)}, packed {format_size(self.packed_bytes)}: uses "
            f"{self.share:.0%} of {format_size(self.separate_bytes)}, one buffer a value; no "
            f"layout is below {format_size(self.layout.bound)}"
        )

    def draw(self, path: str | Path) -> None:
        """Draw where each temporary lies while it is needed: operations across, offsets up.

        Raises:
            UsageError: matplotlib is missing, or does not know the kind of file.
        """
        figure = new_figure(9, 5)
        axes = figure.subplots()
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Rectangle

        scale = 2**20
        boxes = [
            Rectangle((one.begin, at / scale), one.end - one.begin, one.nbytes / scale)
            for one, at in zip(self.temporaries, self.layout.offsets, strict=True)
        ]
        shades = [0.15 + 0.7 * (number * 0.618 % 1) for number in range(len(boxes))]
        patches = PatchCollection(boxes, edgecolor="white", linewidth=0.2, cmap="viridis")
        patches.set_array(shades)
        axes.add_collection(patches)
        axes.set_xlim(0, max((one.end for one in self.temporaries), default=1))
        axes.set_ylim(0, 1.05 * max(self.packed_bytes, 1) / scale)
        axes.set_xlabel("operations in their order")
        axes.set_ylabel("offset, MiB")
        axes.set_title(f"temporaries, packed: {self.share:.0%} of one buffer a value")
        save_figure(figure, path)


def explained(program: Program, seconds: float) -> Explanation:
    """Describe a program; a better layout than greedy ones is looked for for so many seconds."""
    found = temporaries(program)
    blocks = [Block(one.begin, one.end, one.nbytes, ALIGNMENT_BYTES) for one in found]
    captured, ordered = program.captured, program.ordered
    outside = captured.recording.outside.values()
    held = [one.tensor for one in outside if one.argument is None]
    nodes = [node for call in program.calls for node in _operations(call)]
    counts = Counter(str(node.target) for node in nodes)
    return Explanation(
        operations=tuple(counts.most_common()),
        micro_batches=captured.loop.count,
        pruned=ordered.pruned,
        folded=ordered.folded,
        repeated=ordered.repeated,
        inputs=sum(one.argument is not None for one in outside),
        state=len(held),
        outputs=len(captured.returned),
        state_bytes=sum(one.nbytes for one in held),
        plans=tuple(graph.plan for graph in program.graphs),
        temporaries=tuple(found),
        layout=laid_out(blocks, seconds),
    )


def _operations(call: Call) -> list[fx.Node]:
    return [
        node for node in call.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    ]


def temporaries(program: Program) -> list[Temporary]:
    """Return the storages that a step's graphs make, in the order of being made."""
    clock = _Clock()
    for call in program.calls:
        clock.run(call)
    clock.keep([node for node in program.ordered.results if node is not None])
    return clock.found()


def most_at_once(program: Program) -> int:
    """Return the most bytes of temporaries that a step needs at one time."""
    return bound(Block(one.begin, one.end, one.nbytes) for one in temporaries(program))


class _Clock:
    """Goes through the graphs, and notes when each storage is made and used last."""

    def __init__(self) -> None:
        self.time = 0
        self.current: dict[int, int] = {}
        """Which of the storages below each memory is now."""
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.sizes: list[int] = []
        self.names: list[str] = []

    def run(self, call: Call) -> None:
        """Go through one graph."""
        made: set[int] = set()
        given = call.module.graph.find_nodes(op="placeholder")
        there = {memory for node in given if not _is_token(node) for memory in memories(node)}
        for node in call.module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self._use(reads(node))
                continue
            self.time += 1
            if node.target in (FETCH, WAIT):
                self._make(memories(node.args[0]) - made, node)
                made |= memories(node.args[0])
                self._size(memories(node.args[0]), node)
            elif node.target is not STORE:
                new = memories(node) - there - made
                self._make(new, node)
                made |= new
                self._size(memories(node), node)
            self._use(reads(node) | memories(node))

    def keep(self, nodes: list[fx.Node]) -> None:
        """Have the storages of some nodes live to the end."""
        for node in nodes:
            self._use(memories(node))

    def found(self) -> list[Temporary]:
        """Return what was noted."""
        columns = zip(self.names, self.begins, self.ends, self.sizes, strict=True)
        return [Temporary(*one) for one in columns if one[3]]

    def _make(self, memory: frozenset[int] | set[int], node: fx.Node) -> None:
        for one in sorted(memory):
            self.current[one] = len(self.begins)
            self.begins.append(self.time)
            self.ends.append(self.time + 1)
            self.sizes.append(0)
            self.names.append(str(node.target))

    def _size(self, memory: frozenset[int], node: fx.Node) -> None:
        val: Any = node.meta.get("val")
        if isinstance(val, torch.Tensor) and node.target is not FETCH:
            for one in memory & self.current.keys():
                number = self.current[one]
                self.sizes[number] = max(self.sizes[number], val.untyped_storage().nbytes())

    def _use(self, memory: frozenset[int]) -> None:
        for one in memory & self.current.keys():
            self.ends[self.current[one]] = self.time + 1


def _is_token(node: fx.Node) -> bool:
    return any(user.target in (FETCH, WAIT) for user in node.users)
