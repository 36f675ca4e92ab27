"""What an Offload does, for users: a table by layer, and figures of a step and of the layers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from storm_client.errors import UsageError
from storm_client.monitoring.stats import OffloadStats
from storm_client.monitoring.trace import Timeline
from storm_client.notebooks import table_html
from storm_client.planner.plan import Plan, new_figure, save_figure
from stormd.protocol.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Report"]

HEADINGS = ("layer", "saved", "duplicates", "offloaded", "recomputed", "kept", "ratio")

MAX_BARS = 40
"""Layers in the figure; the table has all of them."""


@dataclass(frozen=True, slots=True)
class Report:
    """What an Offload did so far. `str()` is a table, and notebooks show it with its figure."""

    stats: OffloadStats
    """Totals of all steps."""
    layers: Mapping[str, OffloadStats]
    """The same by layer, for saved tensors whose layer is known. Tensors skipped by a first check
    (small tensors, parameters) and waits are not included."""
    steps: int
    """How often the Offload was entered."""
    plan: Plan | None
    """The decision for each saved tensor of the latest step signature; None before it is
    learned."""
    timeline: Timeline | None
    """The latest traced step whose backward pass has begun; None before there is one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))

    def __str__(self) -> str:
        """Return a table of the layers, and below it the times of the training threads."""
        rows = [HEADINGS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.steps} steps together"]
        for name, *figures in rows:
            cells = (f"{cell:>{width}}" for cell, width in zip(figures, widths[1:], strict=True))
            lines.append("  ".join((f"{name:<{widths[0]}}", *cells)))
        return "\n".join((*lines, *self._sums()))

    def draw(self, path: str | Path) -> None:
        """Draw the latest step over time, its plan, and the ratio of each layer.

        The suffix of `path` is the file type: ".svg", ".png" or another that matplotlib supports.
        An existing file is replaced.

        Raises:
            UsageError: matplotlib is missing or does not support the file type, or no step has
                been learned.
            OSError: the file cannot be written.
        """
        save_figure(self._figure(), path)

    def _repr_html_(self) -> str:
        """Return the table, and the figure if there is one to be drawn."""
        try:
            picture = io.StringIO()
            self._figure().savefig(picture, format="svg")
        except UsageError:
            return self._html_table()
        svg = picture.getvalue()
        return self._html_table() + svg[svg.index("<svg") :]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, stats in self.layers.items():
            yield _row(name, stats)
        yield _row("everything", self.stats)

    def _sums(self) -> Iterator[str]:
        stats = self.stats
        yield "everything: also outside of layers; kept: also parameters and small tensors"
        yield (
            f"training threads: {stats.store_seconds:.3f} s for stores, "
            f"{stats.restore_wait_seconds:.3f} s waiting for restores, "
            f"{stats.replay_seconds:.3f} s recomputing"
        )
        if self.plan is None:
            yield "no plan yet: a step has to end first"
        else:
            shares = (f"{name} {format_size(n)}" for name, n in self.plan.bytes_by_decision.items())
            yield f"the plan of a step: {', '.join(shares)}; print(offload.plan) has each tensor"

    def _html_table(self) -> str:
        notes = (f"{self.steps} steps together", *self._sums())
        return table_html(HEADINGS, self._rows(), notes)

    def _figure(self) -> Any:
        """Return the figure; raise UsageError if there is no step to draw, or no matplotlib."""
        if self.plan is None or self.timeline is None:
            raise UsageError(
                "there is no step to draw yet: draw the report when a step has had its backward "
                "pass and ended"
            )
        figure = new_figure(12, 9)
        (memory, plan_bytes), (threads, plan_seconds), (link, ratios) = figure.subplots(3, 2)
        _draw_memory(memory, self.timeline)
        _draw_threads(threads, self.timeline)
        _draw_stored(link, self.timeline)
        self.plan.draw_bytes(plan_bytes)
        self.plan.draw_seconds(plan_seconds)
        _draw_ratios(ratios, self.layers)
        return figure


def _row(name: str, stats: OffloadStats) -> tuple[str, ...]:
    sizes = (
        stats.saved_bytes,
        stats.deduplicated_bytes,
        stats.offloaded_bytes,
        stats.replayed_bytes,
        stats.skipped_bytes + stats.kept_bytes,
    )
    ratio = f"{stats.ratio:.2f}" if stats.stored_bytes else "-"
    return (name, *map(format_size, sizes), ratio)


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    moments = timeline.moments
    bands = {
        name: [getattr(moment, name) / 2**30 for moment in moments]
        for name in ("kept", "offloaded", "replayed")
    }
    axes.stackplot([m.seconds for m in moments], *bands.values(), labels=list(bands), step="post")
    axes.legend(loc="upper left")
    axes.set_ylabel("GiB saved, not used yet")
    axes.set_title("the latest step, as its threads saw it")


def _draw_threads(axes: Axes, timeline: Timeline) -> None:
    end = max((moment.seconds for moment in timeline.moments), default=0.0)
    kinds = ("replay", "wait", "store")
    for height, kind in enumerate(kinds):
        spans = [(p.begin, p.end - p.begin) for p in timeline.pauses if p.kind == kind]
        axes.broken_barh(spans, (height - 0.4, 0.8), color=f"C{height}")
    axes.set_yticks(range(len(kinds)), ["recomputing", "restoring", "storing"])
    axes.set_xlim(0.0, end or 1.0)
    axes.set_ylabel("otherwise computing")


def _draw_stored(axes: Axes, timeline: Timeline) -> None:
    seconds = [moment.seconds for moment in timeline.moments]
    axes.plot(seconds, [moment.stored / 2**30 for moment in timeline.moments])
    axes.set_ylabel("GiB that have reached the pool")
    axes.set_xlabel("seconds since the step began")


def _draw_ratios(axes: Axes, layers: Mapping[str, OffloadStats]) -> None:
    known = [(name, one.ratio) for name, one in layers.items() if one.stored_bytes][:MAX_BARS]
    axes.barh([name for name, _ in known], [ratio for _, ratio in known])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ratio of a layer, all steps")
