"""Draws step time against memory, from recorded runs of `stormd bench train`.

    python tests/bench/draw_frontier.py docs/pictures/frontier.svg \
        tests/bench/results/train_h200.json:10,12 tests/bench/results/train_plan_h200.json:4,6

A run is named by its place in its file. Times are ratios to the step without offload of the same
run, since cards and days differ; memory is what trainer and daemon hold on the GPU together. Of a
method that several runs have, the last that is named counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from storm_bench.pictures import total_bytes
from storm_bench.train import BUDGET_PREFIX

LABELS = {
    "none": "no offload",
    "checkpoint": "checkpoint",
    "checkpoint-on-cpu": "checkpoint, inputs offloaded",
    "selective": "selective checkpoint",
    "trl": "TRL",
    "save-on-cpu": "save_on_cpu",
    "storm": "stormd",
}
GIB = 1 << 30

Point = tuple[float, float]
"""GiB, and the step's time as a ratio."""


def points(runs: list[dict[str, Any]], workload: str) -> dict[str, Point]:
    """Return each method's point of a workload."""
    found: dict[str, Point] = {}
    for run in runs:
        rows = run["figures"]["workloads"].get(workload, {})
        plain = rows.get("none", {}).get("step_seconds")
        for method, row in rows.items():
            nbytes = total_bytes(row) if "step_seconds" in row else None
            known = method in LABELS or method.startswith(BUDGET_PREFIX)
            if known and plain and nbytes is not None:
                found[method] = nbytes / GIB, row["step_seconds"] / plain
    return found


def draw(plot: Axes, found: dict[str, Point]) -> None:
    """Draw a workload's points, and a line through ours and the step without offload."""
    ours = sorted(at for method, at in found.items() if method.startswith("storm"))
    plot.plot(*zip(*[*ours, found["none"]], strict=True), color="tab:red", linewidth=1, zorder=1)
    for method, point in found.items():
        is_ours = method.startswith("storm")
        label = LABELS.get(method) or f"stormd, budget {method.removeprefix(BUDGET_PREFIX)}"
        plot.scatter(*point, s=40, color="tab:red" if is_ours else "tab:blue", zorder=2)
        place = (-6, -14) if is_ours else (6, 5)
        plot.annotate(label, point, xytext=place, textcoords="offset points", fontsize=8)
    plot.grid(alpha=0.3)
    plot.set_xlim(0, 1.25 * max(at[0] for at in found.values()))
    plot.set_ylim(0.9, 1.1 * max(at[1] for at in found.values()))
    plot.set_xlabel("GiB on the GPU, trainer and daemon")


def runs_of(text: str) -> list[dict[str, Any]]:
    """Return the runs that FILE:N,N names."""
    name, _, numbers = text.partition(":")
    runs = json.loads(Path(name).read_text())["runs"]
    return [runs[int(number)] for number in numbers.split(",")]


def main() -> None:
    """Draw what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("runs", nargs="+", type=runs_of, metavar="FILE:N,N")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W3", "llama"])
    args = parser.parse_args()
    runs = [run for some in args.runs for run in some]
    figure = Figure(figsize=(4.2 * len(args.workloads), 3.4), layout="constrained")
    plots = figure.subplots(1, len(args.workloads), squeeze=False)[0]
    for plot, workload in zip(plots, args.workloads, strict=True):
        plot.set_title(workload, fontsize=10)
        draw(plot, points(runs, workload))
    plots[0].set_ylabel("a step, times that without offload")
    figure.savefig(args.image, metadata={"Date": None} if args.image.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
