"""What is noted beside a node of a step's graph: in which memory it lies, and which it writes."""

from __future__ import annotations

import torch
from torch import fx

from storm_client.compile.exactness import draws

__all__ = ["BACKWARD", "MEMORY", "PART", "WRITTEN", "is_random", "memories", "reads", "writes"]

MEMORY, WRITTEN, BACKWARD, PART = (
    "stormd_memory",
    "stormd_written",
    "stormd_backward",
    "stormd_part",
)
"""In a node's `meta`: the storages its results lie in, those it writes to, whether a backward pass
ran it, and which micro-batch it belongs to."""


def memories(node: fx.Node) -> frozenset[int]:
    """Return the storages that a node's results lie in."""
    found: frozenset[int] = node.meta.get(MEMORY, frozenset())
    return found


def writes(node: fx.Node) -> frozenset[int]:
    """Return the storages that a node writes to besides making them."""
    found: frozenset[int] = node.meta.get(WRITTEN, frozenset())
    return found


def reads(node: fx.Node) -> frozenset[int]:
    """Return the storages that a node's arguments lie in."""
    found: set[int] = set()
    for source in node.all_input_nodes:
        found |= memories(source)
    return frozenset(found)


def is_random(node: fx.Node) -> bool:
    """Tell whether a node draws random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return draws(target) and not _draws_nothing(node)


def _draws_nothing(node: fx.Node) -> bool:
    """Tell whether dropout's probability, or that of attention, is zero."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    for place, described in enumerate(target._schema.arguments):
        if described.name == "dropout_p":
            value = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p")
            return value in (0, 0.0, None)
    return False
