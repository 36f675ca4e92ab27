"""Draws pictures of the benchmarks' figures; only measured values are drawn.

Each function takes the figures that a benchmark returns, and the file to write, whose suffix
determines the format. They raise ImportError if matplotlib is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from storm_bench.train import BUDGET_PREFIX
from storm_bench.zoo import MODELS

__all__ = ["draw_train", "draw_zoo", "total_bytes"]

_OUR_METHODS: Final = "storm"
_GIB: Final = 1 << 30
_PLOTS_A_LINE: Final = 4
_AXIS_ROOM: Final = 1.25
"""Factor by which each axis is lengthened, to have space for the names."""


def total_bytes(row: dict[str, Any]) -> int | None:
    """Return the bytes of GPU memory that a method takes in both processes; None if not known."""
    trainer, daemon = row.get("process_device_bytes"), row.get("daemon_device_bytes")
    if trainer is None or (daemon is None and "offload" in row):
        return None
    return int(trainer) + (int(daemon) if daemon and "offload" in row else 0)


def draw_train(figures: dict[str, Any], path: Path) -> None:
    """Draw step time against memory: a plot per workload, a point per method, a line of budgets.

    The memory is that of both processes on the GPU if it is known for all methods, else the peak.
    """
    from matplotlib.figure import Figure

    workloads = figures["workloads"]
    columns = max(1, min(len(workloads), _PLOTS_A_LINE))
    lines = max(1, -(-len(workloads) // columns))
    figure = Figure(figsize=(5 * columns, 4.5 * lines), layout="constrained")
    plots = list(figure.subplots(lines, columns, squeeze=False).flat)
    for plot in plots[len(workloads) :]:
        plot.set_axis_off()
    for plot, (name, rows) in zip(plots, workloads.items(), strict=False):
        measured = {method: row for method, row in rows.items() if "step_seconds" in row}
        totals = [total for row in measured.values() if (total := total_bytes(row)) is not None]
        is_total = len(totals) == len(measured)
        sizes = totals if is_total else [row["peak_bytes"] for row in measured.values()]
        points = {}
        for (method, row), nbytes in zip(measured.items(), sizes, strict=True):
            points[method] = nbytes / _GIB, 1e3 * row["step_seconds"]
            _point(plot, method, points[method])
        budgets = [at for method, at in points.items() if method.startswith(BUDGET_PREFIX)]
        if budgets:
            plot.plot(*zip(*sorted(budgets), strict=True), color="tab:red", linewidth=0.8)
        plot.set(title=name, xlabel="total GiB" if is_total else "peak GiB", ylabel="ms a step")
        plot.set_xlim(0, _AXIS_ROOM * plot.get_xlim()[1])
        plot.set_ylim(0, _AXIS_ROOM * plot.get_ylim()[1])
    figure.savefig(path, dpi=150)


def draw_zoo(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the same picture of those rows of the zoo that have a peak."""
    workloads: dict[str, dict[str, Any]] = {}
    for row in rows:
        budget = row.get("budget")
        method = row["method"] if budget is None else f"{BUDGET_PREFIX}{budget}"
        if "peak_gib" in row:
            point = {"step_seconds": row["ms"] / 1e3, "peak_bytes": row["peak_gib"] * _GIB}
            workloads.setdefault(MODELS[row["model"]], {})[method] = point
    draw_train({"workloads": workloads}, path)


def _point(plot: Any, method: str, point: tuple[float, float]) -> None:
    plot.scatter(*point, s=36, color="tab:red" if method.startswith(_OUR_METHODS) else "tab:blue")
    name = method.removeprefix(BUDGET_PREFIX)
    plot.annotate(name, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
