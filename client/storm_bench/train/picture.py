"""Draws step time against peak memory, a plot a workload and a point a method.

Only what was measured is drawn. Both axes begin at zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

__all__ = ["draw"]

_OURS: Final = "storm"
_GIB: Final = 1 << 30
_ROOM: Final = 1.25
"""Of each axis beyond the last point, for the names."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write a picture of `measure_train`'s figures to `path`; the suffix says which format.

    Raises ImportError where matplotlib is missing.
    """
    from matplotlib.figure import Figure

    workloads = figures["workloads"]
    figure = Figure(figsize=(5 * len(workloads), 4.5), layout="constrained")
    plots = figure.subplots(1, len(workloads), squeeze=False)[0]
    for plot, (name, rows) in zip(plots, workloads.items(), strict=True):
        for method, row in rows.items():
            if "step_seconds" in row:
                _point(plot, method, row)
        plot.set(title=name, xlabel="peak GiB", ylabel="ms a step")
        plot.set_xlim(0, _ROOM * plot.get_xlim()[1])
        plot.set_ylim(0, _ROOM * plot.get_ylim()[1])
    figure.savefig(path, dpi=150)


def _point(plot: Any, method: str, row: dict[str, Any]) -> None:
    x, y = row["peak_bytes"] / _GIB, 1e3 * row["step_seconds"]
    plot.scatter(x, y, s=36, color="tab:red" if method.startswith(_OURS) else "tab:blue")
    plot.annotate(method, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
