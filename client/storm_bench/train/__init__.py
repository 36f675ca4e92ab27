"""One training step by every method of keeping activations; the client's side of `bench train`.

Methods differ in what happens to saved tensors and in nothing else: same model, same seed, same
kernels. Each runs in a process of its own, so no allocator remembers another, unless they are to
be measured together.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["BUDGET_PREFIX", "again", "plain_seconds"]

BUDGET_PREFIX: Final = "storm-budget="
"""Before a budget: the name of the method that offloads within it."""

_AGAIN: Final = "again_seconds"


def again(row: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a method that was measured once more behind all others."""
    return {_AGAIN: row["step_seconds"]} if "step_seconds" in row else {}


def plain_seconds(rows: dict[str, dict[str, Any]]) -> float | None:
    """Return what a step of a workload takes without offload; None where that is not known.

    That is the mean of before and behind all others, where it was measured twice.
    """
    plain = rows.get("none", {})
    if "step_seconds" not in plain:
        return None
    first = float(plain["step_seconds"])
    return (first + float(plain.get(_AGAIN, first))) / 2
