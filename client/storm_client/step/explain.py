"""Describes a captured step for users: its operations, its plan, and its temporaries in memory.

The figures are for memory as planned. Tensors that live between steps, parameters and optimizer
state, are counted separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from storm_client.planner.plan import Plan, new_figure, save_figure
from storm_client.step.program import Program
from storm_client.step.temporaries import Layout, Temporary, laid_out
from stormd.protocol.sizes import format_size

__all__ = ["Explanation", "explained"]

SHOWN = 12
"""Kinds of operations that are listed by name."""


@dataclass(frozen=True)
class Explanation:
    """A captured step. `str()` is a summary; `draw` makes a picture of its memory."""

    operations: tuple[tuple[str, int], ...]
    """How often each operation runs, most frequent first; those of a loop's body count once."""
    micro_batches: int
    """How often the body of the step's loop runs, 0 without one."""
    pruned: int
    folded: int
    repeated: int
    """Numbers of operations left out: needed by no result, constant, or computed before."""
    inputs: int
    state: int
    outputs: int
    """Numbers of tensor arguments, of tensors that live between steps, and of returned values."""
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
        """Bytes of one buffer that holds all temporaries, each for as long as it is needed."""
        return self.layout.nbytes

    @property
    def share(self) -> float:
        """`packed_bytes` as a fraction of `separate_bytes`."""
        return self.packed_bytes / self.separate_bytes if self.separate_bytes else 1.0

    def __str__(self) -> str:
        """Return a summary: the graph, the plan's decisions for saved values, and bytes."""
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
        """Draw each temporary's place while it is needed: operations across, offsets up.

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


def explained(program: Program) -> Explanation:
    """Describe a program."""
    found = program.temporaries()
    captured, ordered = program.captured, program.ordered
    outside = captured.recording.outside.values()
    held = [one.tensor for one in outside if one.argument is None]
    targets = [node.target for call in program.calls for node in call.module.graph.nodes]
    counts = Counter(str(one) for one in targets if isinstance(one, torch._ops.OpOverload))
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
        layout=laid_out(found),
    )
