"""Draws how long ternary products take beside their peers, and what a model's weights take.

Only what was measured is drawn. Both axes begin at zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

__all__ = ["draw"]

_OURS: Final = ("ours", "SimpleRotorNet")


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write a picture of `measure_ternary`'s figures to `path`; the suffix says which format.

    Raises ImportError where matplotlib is missing.
    """
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


def _bars(plot: Any, values: dict[str, float], title: str, ours: tuple[str, ...] = _OURS) -> None:
    names = list(values)[::-1]
    colors = ["tab:red" if name.startswith(ours) else "tab:blue" for name in names]
    bars = plot.barh(names, [values[name] for name in names], color=colors)
    plot.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    plot.set_title(title)
    plot.margins(x=0.15)
