"""Notes in a step's nodes: the storages of their results, and the storages that they write to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from storm_client.compile.exactness import draws
from storm_client.compile.schemas import argument

__all__ = [
    "BACKWARD",
    "MEMORY",
    "MICRO_BATCH",
    "WRITTEN",
    "is_random",
    "memories",
    "reads",
    "writes",
    "written_by",
]

MEMORY, WRITTEN, BACKWARD, MICRO_BATCH = (
    "stormd_memory",
    "stormd_written",
    "stormd_backward",
    "stormd_micro_batch",
)
"""In a node's `meta`: the storages its results lie in, those it writes to, whether a backward pass
ran it, and which micro-batch it belongs to."""


def memories(node: fx.Node) -> frozenset[int]:
    """Return the storages that a node's results lie in."""
    found: frozenset[int] = node.meta.get(MEMORY, frozenset())
    return found


def writes(node: fx.Node) -> frozenset[int]:
    """Return the storages that a node writes to, other than those that it creates."""
    found: frozenset[int] = node.meta.get(WRITTEN, frozenset())
    return found


def written_by(nodes: Iterable[fx.Node]) -> frozenset[int]:
    """Return the storages that some nodes write to."""
    return frozenset().union(*map(writes, nodes))


def reads(node: fx.Node) -> frozenset[int]:
    """Return the storages that a node's arguments lie in."""
    return frozenset().union(*map(memories, node.all_input_nodes))


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    has_chance = any(one.name == "dropout_p" for one in target._schema.arguments)
    return draws(target) and not (has_chance and not argument(node, "dropout_p"))
