"""Draws step time against memory, from recorded runs of `in_turns.py`.

    python tests/bench/draw_frontier.py docs/pictures/frontier.svg \
        tests/bench/results/in_turns_h200.json W1:65 W3:69 llama:68 llama-lora:66

A run is named by its place in the file. Times are ratios to the step without offload of the same
run, since cards and days differ; memory is PyTorch's peak.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from storm_bench.train import BUDGET_PREFIX

LABELS = {
    "none": "no offload",
    "checkpoint": "checkpoint",
    "checkpoint-tiled-loss": "checkpoint, tiled loss",
    "selective": "selective checkpoint",
    "storm": "stormd",
}
Point = tuple[float, float]
"""GiB, and the step's time as a ratio."""


def points(rows: list[dict[str, Any]]) -> dict[str, Point]:
    """Return each method's point: the means of its turns."""
    turns: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "ms" in row and (row["method"] in LABELS or row["method"].startswith(BUDGET_PREFIX)):
            turns.setdefault(row["method"], []).append(row)
    plain = mean(row["ms"] for row in turns["none"])
    return {
        method: (mean(row["peak_gib"] for row in some), mean(row["ms"] for row in some) / plain)
        for method, some in turns.items()
    }


def draw(plot: Axes, found: dict[str, Point]) -> None:
    """Draw a workload's points, and a line through ours and the step without offload."""
    ours = sorted(at for method, at in found.items() if method.startswith("storm"))
    line = zip(*[*ours, found["none"]], strict=True)
    plot.plot(*line, "o-", color="tab:red", markersize=5, label="stormd, by budget")
    others = sorted((*at, method) for method, at in found.items() if method in LABELS)
    for *at, method in others:
        if method != "storm":
            plot.scatter(*at, s=30, color="tab:blue", zorder=3)
            below = method == "checkpoint-tiled-loss"
            place = {"xytext": (5, -9 if below else 4), "textcoords": "offset points"}
            plot.annotate(LABELS[method], at, fontsize=7, **place)
    memory, ratios = zip(*found.values(), strict=True)
    plot.grid(alpha=0.3)
    plot.set_xlim(0.9 * min(memory), 1.35 * max(memory))
    plot.set_ylim(0.98 * min(ratios), 1.04 * max(ratios))
    plot.set_xlabel("GiB at PyTorch's peak")
    plot.legend(loc="upper right", fontsize=7)


def main() -> None:
    """Draw what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("workloads", nargs="+", metavar="NAME:RUN")
    args = parser.parse_args()
    runs = json.loads(args.results.read_text())["runs"]
    figure = Figure(figsize=(3.4 * len(args.workloads), 3.2), layout="constrained")
    plots = figure.subplots(1, len(args.workloads), squeeze=False)[0]
    for plot, one in zip(plots, args.workloads, strict=True):
        workload, _, run = one.partition(":")
        plot.set_title(workload, fontsize=10)
        draw(plot, points(runs[int(run)]["rows"]))
    plots[0].set_ylabel("a step, times that without offload")
    figure.savefig(args.image, metadata={"Date": None} if args.image.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
