"""One training step by every method of keeping activations; the client's side of `bench train`.

Except for the gated and tiled-loss ones, methods differ only in what happens to saved tensors: same
model, same seed, same kernels. Each runs in a process of its own, so that each has a new allocator,
unless methods are measured together.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["BUDGET_PREFIX", "again", "plain_seconds"]

BUDGET_PREFIX: Final = "storm-budget="
"""Prefix of a budget: together they name the method that offloads within that budget."""

_AGAIN: Final = "again_seconds"


def again(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that are kept of a method's second measurement, after all others."""
    return {_AGAIN: row["step_seconds"]} if "step_seconds" in row else {}


def plain_seconds(rows: dict[str, dict[str, Any]]) -> float | None:
    """Return the seconds of a workload's step without offload; None if they are not known.

    If they were measured twice, before and after all other methods, the mean is returned.
    """
    plain = rows.get("none", {})
    if "step_seconds" not in plain:
        return None
    first = float(plain["step_seconds"])
    return (first + float(plain.get(_AGAIN, first))) / 2
