"""A plan for users: a table of the decision for each value, and a drawing of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from storm_client.errors import UsageError
from storm_client.notebooks import table_html
from storm_client.planner.decisions import Keep, Offload, Replay
from storm_client.planner.devices import parts_of
from storm_client.planner.problem import Problem
from storm_client.planner.solver import Choice
from storm_client.planner.timeline import checkpointed, kept_by_checkpointing, planned
from stormd.protocol.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Plan", "Row", "new_figure", "save_figure"]

SHOWN = 4
"""Number of operations that are named, of those whose results are kept."""


@dataclass(frozen=True, slots=True)
class Row:
    """A saved tensor's storage, or one that is stored because others are recomputed from it."""

    operation: str
    """The function that made it; "unknown" if none was observed."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    decision: str
    """"keep", "offload" or "replay"."""
    reason: str
    cost: float
    """Seconds of the recomputation, or of the link one way."""
    is_checkpointed: bool = field(default=False, compare=False)
    """Whether checkpointing each block would keep it, as a block's input or outside all blocks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one step signature, in the order in which its values are made."""

    rows: tuple[Row, ...]
    peak_bytes: int
    """Bytes of saved tensors that are kept by decision, at the end of the forward pass."""
    link_seconds: float
    """Link time of a step, in one direction."""
    replay_seconds: float
    """Time of recomputed operations in a step."""
    forward_seconds: float
    """Measured time of the forward pass; before it was measured, the sum of its operations. 0.0 if
    it is not known, as for a graph on a CPU."""
    stall_seconds: float = 0.0
    """Time that a compiled graph is expected to wait for the link."""
    turn_bytes: int | None = None
    """Bytes that may be in flight when the forward pass ends; None for the best amount."""
    in_flight_bytes: int = 0
    """Most bytes of offloaded tensors that are on a GPU at once: not stored yet, or prefetched."""
    checkpointed_bytes: int | None = None
    """Bytes that checkpointing each block would keep; None if no blocks are known."""
    fullest_bytes: int | None = None
    """Predicted peak of saved tensors and gradients in a step, without bytes in flight, on the
    fullest of several GPUs; None if no blocks are known."""
    checkpointed_fullest_bytes: int | None = None
    """The same if each block is checkpointed."""
    measured: frozenset[str] = frozenset()
    """Which of the machine's figures were measured, as `Machine.measured`."""
    compared: str = ""
    """Text for users: the step times with this plan and with others; empty if none were
    compared."""

    @classmethod
    def of(cls, problem: Problem, choice: Choice, measured: frozenset[str] = frozenset()) -> Plan:
        """Describe the choice for a step. `measured` names the figures that were measured."""
        rows = []
        beside = problem.block_ends and problem.recomputes
        others_keep = kept_by_checkpointing(problem) if beside else frozenset()
        parts = parts_of(problem) if beside else []
        for value, decision, reason, cost in zip(
            problem.values, choice.decisions, choice.reasons, choice.costs, strict=True
        ):
            if not (value.is_saved or isinstance(decision, Keep | Replay) or cost):
                continue
            why = problem.rejected.get(value.number, reason)
            row = Row(
                value.operation or "unknown",
                value.shape,
                value.dtype,
                value.nbytes,
                _NAMES[type(decision)],
                why,
                cost,
                value.number in others_keep,
            )
            rows.append(row)
        return cls(
            tuple(rows),
            choice.kept_bytes,
            choice.link_seconds,
            choice.replay_seconds,
            choice.forward_seconds,
            checkpointed_bytes=problem.nbytes(others_keep) if beside else None,
            fullest_bytes=max(
                (planned(one.problem, one.choice_of(choice).decisions).peak_bytes for one in parts),
                default=None,
            ),
            checkpointed_fullest_bytes=max(
                (checkpointed(one.problem).peak_bytes for one in parts), default=None
            ),
            measured=measured,
        )

    def __str__(self) -> str:
        """Return a table, with one line for equal rows, and sums below the table."""
        lines = [
            f"{name:<28} {shape:<24} {nbytes:>10}  {decision:<8} {cost:>8}  {reason}"
            for name, shape, nbytes, decision, cost, reason in (_HEADINGS, *self._lines())
        ]
        for decision, nbytes in self.bytes_by_decision.items():
            lines.append(f"{decision:<8} {format_size(nbytes):>10}")
        return "\n".join([*lines, *self._sums()])

    def _repr_html_(self) -> str:
        """Return the same table for a notebook."""
        sums = (f"{name} {format_size(n)}" for name, n in self.bytes_by_decision.items())
        return table_html(_HEADINGS, self._lines(), (", ".join(sums), *self._sums()))

    def _sums(self) -> Iterator[str]:
        """Yield the lines below the table, as far as they are known."""
        yield self._times()
        if self.checkpointed_bytes is not None:
            yield self._beside_checkpointing(self.checkpointed_bytes)
        if self.fullest_bytes is not None and self.checkpointed_fullest_bytes is not None:
            yield (
                f"a step's predicted peak: {format_size(self.fullest_bytes)}; with each block "
                f"checkpointed: {format_size(self.checkpointed_fullest_bytes)} "
                "(saved tensors and gradients)"
            )
        if self.in_flight_bytes:
            yield f"in flight at once: up to {format_size(self.in_flight_bytes)} more"
        if self.compared:
            yield f"compared: {self.compared}"

    def _lines(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of the table, one line for equal rows."""
        for row, count in Counter(self.rows).items():
            shape = "x".join(map(str, row.shape)) + f" {str(row.dtype).removeprefix('torch.')}"
            size, cost = format_size(row.nbytes * count), f"{1e3 * row.cost * count:.2f}"
            yield f"{count} x {row.operation}", shape, size, row.decision, cost, row.reason

    def _beside_checkpointing(self, kept: int) -> str:
        """Return a comparison of the kept bytes with those that checkpointing each block keeps.

        If the plan keeps more, name the operations whose results checkpointing would recompute.
        """
        own = self.bytes_by_decision["keep"]
        text = (
            f"checkpointing each block would keep {format_size(kept)}, the plan {format_size(own)}"
        )
        if own <= kept:
            return text
        largest: Counter[str] = Counter()
        for row in self.rows:
            if row.decision == _NAMES[Keep] and not row.is_checkpointed:
                largest[row.operation] += row.nbytes
        most = (f"{name} {format_size(n)}" for name, n in largest.most_common(SHOWN))
        return f"{text}, of which it would recompute {', '.join(most)}"

    def _times(self) -> str:
        """Return the times of a step, as far as they are known."""
        times = (
            f"link {1e3 * self.link_seconds:.1f} ms each way, replay "
            f"{1e3 * self.replay_seconds:.1f} ms"
        )
        if self.forward_seconds:
            times += f", forward {1e3 * self.forward_seconds:.1f} ms"
        if self.measured:
            times += f"; measured: {', '.join(sorted(self.measured))}"
        return times

    @property
    def bytes_by_decision(self) -> dict[str, int]:
        """Bytes of the rows that are kept, offloaded and replayed, under those three names."""
        sums = dict.fromkeys(_NAMES.values(), 0)
        for row in self.rows:
            sums[row.decision] += row.nbytes
        return sums

    def in_short(self) -> str:
        """Return a clause that sums up what a step does by this plan."""
        sizes = {name: format_size(nbytes) for name, nbytes in self.bytes_by_decision.items()}
        return f"{sizes['offload']} offloaded, {sizes['replay']} recomputed, {sizes['keep']} kept"

    def draw(self, path: str | Path) -> None:
        """Draw a step, value by value: bytes by decision, and seconds of the link and of replays.

        Raises:
            UsageError: matplotlib is missing, or does not support the file type.
        """
        figure = new_figure(9, 5)
        stacked, spent = figure.subplots(2, 1, sharex=True)
        self.draw_bytes(stacked)
        self.draw_seconds(spent)
        save_figure(figure, path)

    def draw_bytes(self, axes: Axes) -> None:
        """Draw the bytes of each decision, in the order in which values are made."""
        totals: dict[str, list[float]] = {name: [0.0] for name in _NAMES.values()}
        for row in self.rows:
            for decision, sums in totals.items():
                sums.append(sums[-1] + (row.nbytes / 2**30 if row.decision == decision else 0.0))
        axes.stackplot(range(len(self.rows) + 1), *totals.values(), labels=list(totals))
        axes.legend(loc="upper left")
        axes.set_ylabel("GiB made so far")
        axes.set_title("the plan")

    def draw_seconds(self, axes: Axes) -> None:
        """Draw the seconds of the link and of recomputation, beside the forward pass."""
        for decision, label in (("offload", "link, each way"), ("replay", "replay")):
            sums = [0.0]
            for row in self.rows:
                sums.append(sums[-1] + (1e3 * row.cost if row.decision == decision else 0.0))
            axes.plot(sums, label=label)
        axes.axhline(1e3 * self.forward_seconds, linestyle=":", label="forward pass")
        axes.legend(loc="upper left")
        axes.set_ylabel("ms so far")
        axes.set_xlabel("values in the order in which they are made")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches; raise UsageError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "drawing needs matplotlib: pip install matplotlib, or print instead"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of the file's suffix; raise UsageError if there is none."""
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"cannot draw to {str(path)!r}: {error}") from error


_HEADINGS = ("operation", "shape", "bytes", "decision", "ms", "why")

_NAMES = {Keep: "keep", Offload: "offload", Replay: "replay"}
