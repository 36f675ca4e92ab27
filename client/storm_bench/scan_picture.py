"""Draws how many times a copy's time each scan takes, a bar a way in a group a case.

Only what was measured is drawn. The axis is logarithmic and says 1 for the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["draw"]

_WIDTH: Final = 0.8
"""Of a group of bars, where groups are 1 apart."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write a picture of `measure_scan`'s figures to `path`; the suffix says which format.

    Raises ImportError where matplotlib is missing.
    """
    from matplotlib.figure import Figure

    groups = list(_groups(figures["cases"]))
    ways = list(dict.fromkeys(way for _, rows in groups for way in rows))
    figure = Figure(figsize=(max(5.0, 1.3 * len(groups)), 4.5), layout="constrained")
    plot = figure.subplots()
    for number, way in enumerate(ways):
        places = [i for i, (_, rows) in enumerate(groups) if way in rows]
        shift = (number - (len(ways) - 1) / 2) * _WIDTH / len(ways)
        heights = [groups[i][1][way] for i in places]
        plot.bar([i + shift for i in places], heights, _WIDTH / len(ways), label=way)
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
