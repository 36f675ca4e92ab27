"""Draws what the codec reaches against the bound, one point a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["draw"]


def draw(families: list[dict[str, Any]], path: Path) -> None:
    """Write a picture of `families` (see figures.py) to `path`; the suffix says which format.

    Raises ImportError where matplotlib is missing.
    """
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
