"""Draws step time against memory, from recorded runs of `stormd bench train`.

    python tests/bench/draw_frontier.py docs/pictures/frontier.svg \
        tests/bench/results/train_frontier_h200.json:0,1

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
from storm_bench.train import BUDGET_PREFIX, plain_seconds

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
SHOWN = 1.6
"""Times the step without offload; what takes longer stands at the edge, with its ratio."""

Point = tuple[float, float]
"""GiB, and the step's time as a ratio."""


def points(runs: list[dict[str, Any]], workload: str) -> dict[str, Point]:
    """Return each method's point of a workload."""
    found: dict[str, Point] = {}
    for run in runs:
        rows = run["figures"]["workloads"].get(workload, {})
        plain = plain_seconds(rows)
        for method, row in rows.items():
            nbytes = total_bytes(row) if "step_seconds" in row else None
            known = method in LABELS or method.startswith(BUDGET_PREFIX)
            if known and plain and nbytes is not None:
                found[method] = nbytes / GIB, row["step_seconds"] / plain
    return found


def draw(plot: Axes, found: dict[str, Point]) -> None:
    """Draw a workload's points, and a line through ours and the step without offload."""
    ours = sorted(at for method, at in found.items() if method.startswith("storm"))
    line = zip(*[*ours, found["none"]], strict=True)
    plot.plot(*line, "o-", color="tab:red", markersize=5, label="stormd, by budget")
    others = sorted((*at, method) for method, at in found.items() if method in LABELS)
    beyond = 0
    for nbytes, ratio, method in others:
        if method == "storm":
            continue
        label, place = LABELS[method], (5, 4)
        if ratio > SHOWN:
            beyond += 1
            label, place = f"{label}: {ratio:.1f}", (5, -9 * beyond)
        at = nbytes, min(ratio, SHOWN)
        plot.scatter(*at, s=30, color="tab:blue", zorder=3)
        plot.annotate(label, at, xytext=place, textcoords="offset points", fontsize=7)
    memory = [at[0] for at in found.values()]
    plot.grid(alpha=0.3)
    plot.set_xlim(0.9 * min(memory), 1.2 * max(memory))
    plot.set_ylim(0.97, SHOWN + 0.02)
    plot.set_xlabel("GiB on the GPU, trainer and daemon")
    plot.legend(loc="upper right", fontsize=7)


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
    parser.add_argument("--workloads", nargs="+", default=["W1", "W3", "llama", "llama-lora"])
    args = parser.parse_args()
    runs = [run for some in args.runs for run in some]
    figure = Figure(figsize=(3.4 * len(args.workloads), 3.2), layout="constrained")
    plots = figure.subplots(1, len(args.workloads), squeeze=False)[0]
    for plot, workload in zip(plots, args.workloads, strict=True):
        plot.set_title(workload, fontsize=10)
        draw(plot, points(runs, workload))
    plots[0].set_ylabel("a step, times that without offload")
    figure.savefig(args.image, metadata={"Date": None} if args.image.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
