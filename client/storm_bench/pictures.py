"""Draws pictures of the benchmarks' figures; only measured values are drawn.

Each function takes the figures that a benchmark returns, and the file to write, whose suffix
determines the format. They raise ImportError if matplotlib is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from storm_bench.train import BUDGET_PREFIX
from storm_bench.zoo import MODELS

__all__ = [
    "draw_captured",
    "draw_scan",
    "draw_ternary",
    "draw_train",
    "draw_zoo",
    "total_bytes",
]

_BARS_WIDTH: Final = 0.8
"""Width of a group of bars; groups are 1 apart."""

_OUR_PEERS: Final = ("ours", "SimpleRotorNet")
_OUR_METHODS: Final = "storm"
_GIB: Final = 1 << 30
_PLOTS_A_LINE: Final = 4
_AXIS_ROOM: Final = 1.25
"""Factor by which each axis is lengthened, to have space for the names."""


def draw_captured(families: list[dict[str, Any]], path: Path) -> None:
    """Draw the codec's ratio against that of the bound, one point per captured tensor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    for family in families:
        tensors = family["tensors"]
        bound = [t["raw_nbytes"] / max(t["bound_nbytes"], 1) for t in tensors]
        reached = [t["raw_nbytes"] / t["dense_nbytes"] for t in tensors]
        axes.scatter(bound, reached, s=18, alpha=0.6, label=family["family"])
    axes.set(xscale="log", yscale="log", xlabel="order-0 bound, x", ylabel="ANCF dense, x")
    axes.axline((1, 1), (10, 10), color="black", linewidth=0.8, label="bound")
    axes.axline((1, 0.94), (10, 9.4), color="black", linewidth=0.8, ls=":", label="6% below")
    axes.set_title("What autograd saves in a training step, encoded")
    axes.legend()
    figure.savefig(path, dpi=150)


def draw_scan(figures: dict[str, Any], path: Path) -> None:
    """Draw each scan's time as a multiple of a copy's: a group per case, a bar per way."""
    from matplotlib.figure import Figure

    groups = list(_groups(figures["cases"]))
    ways = list(dict.fromkeys(way for _, rows in groups for way in rows))
    figure = Figure(figsize=(max(5.0, 1.3 * len(groups)), 4.5), layout="constrained")
    plot = figure.subplots()
    for number, way in enumerate(ways):
        places = [i for i, (_, rows) in enumerate(groups) if way in rows]
        shift = (number - (len(ways) - 1) / 2) * _BARS_WIDTH / len(ways)
        heights = [groups[i][1][way] for i in places]
        plot.bar([i + shift for i in places], heights, _BARS_WIDTH / len(ways), label=way)
    plot.axhline(1.0, color="black", linewidth=0.8)
    plot.set(yscale="log", ylabel="times a copy of the same bytes", title=figures["device"])
    plot.set_xticks(range(len(groups)), [name for name, _ in groups], rotation=30, ha="right")
    plot.legend()
    figure.savefig(path, dpi=150)


def _groups(cases: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    for name, case in cases.items():
        tables = {"": case}
        if "forward" in case:
            tables = {" forward": case["forward"], " backward": case["backward"]}
        for title, rows in tables.items():
            measured = {
                way: row["of_copy"]
                for way, row in rows.items()
                if isinstance(row, dict) and "of_copy" in row
            }
            if measured:
                yield name + title, measured


def draw_ternary(figures: dict[str, Any], path: Path) -> None:
    """Draw the times of ternary products and their peers, and the memory of weights."""
    from matplotlib.figure import Figure

    products = {
        name: peers for name, peers in figures["seconds"].items() if name.startswith("product")
    }
    figure = Figure(figsize=(5 * (len(products) + 1), 4), layout="constrained")
    plots = figure.subplots(1, len(products) + 1, squeeze=False)[0]
    for plot, (name, peers) in zip(plots, products.items(), strict=False):
        times = {peer: 1e6 * found["median"] for peer, found in peers.items()}
        _bars(plot, times, f"{name}, microseconds")
    memory = {name: nbytes / 2**20 for name, nbytes in figures["memory_bytes"].items()}
    _bars(plots[-1], memory, "100 million weights, MiB", ours=("ternary",))
    figure.savefig(path, dpi=150)


def _bars(
    plot: Any, values: dict[str, float], title: str, ours: tuple[str, ...] = _OUR_PEERS
) -> None:
    names = list(values)[::-1]
    colors = ["tab:red" if name.startswith(ours) else "tab:blue" for name in names]
    bars = plot.barh(names, [values[name] for name in names], color=colors)
    plot.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    plot.set_title(title)
    plot.margins(x=0.15)


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
