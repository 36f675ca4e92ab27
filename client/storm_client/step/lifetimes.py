"""When a step's temporaries need their memory: from what makes it to the last that uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from storm_client.step.nodes import memories, reads

__all__ = ["Lifetime", "lifetimes", "peak_of"]


class Lifetime(NamedTuple):
    """One storage that some nodes make: needed at the positions from `begin` up to `end`."""

    memory: int
    begin: int
    end: int
    nbytes: int


def lifetimes(nodes: Sequence[fx.Node]) -> list[Lifetime]:
    """Return the storages that `nodes` make, in order."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    sizes: dict[int, int] = {}
    there: set[int] = set()
    for position, node in enumerate(nodes):
        used = reads(node)
        for memory in used:
            if memory not in begins:
                there.add(memory)
        for memory in memories(node) - there:
            begins.setdefault(memory, position)
        for memory, nbytes in _storages(node):
            sizes[memory] = max(sizes.get(memory, 0), nbytes)
        for memory in (used | memories(node)) & begins.keys():
            ends[memory] = position + 1
    return [
        Lifetime(memory, begin, ends[memory], sizes.get(memory, 0))
        for memory, begin in begins.items()
    ]


def _storages(node: fx.Node) -> Iterable[tuple[int, int]]:
    """Return the storages of a node's tensors with their bytes; of several, by `getitem` alone."""
    val: Any = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        for memory in memories(node):
            yield memory, val.untyped_storage().nbytes()
    elif isinstance(val, (tuple, list)) and not any(
        user.meta.get("val") is not None for user in node.users
    ):
        tensors = [one for one in pytree.tree_leaves(val) if isinstance(one, torch.Tensor)]
        for memory, one in zip(sorted(memories(node)), tensors, strict=False):
            yield memory, one.untyped_storage().nbytes()


def peak_of(nodes: Sequence[fx.Node], results: Iterable[fx.Node] = ()) -> int:
    """Return the position behind the node at which most bytes live, the first such.

    What `results` lie in does not count: gradients are there from their making on, whatever a plan
    does.
    """
    stays = {memory for node in results for memory in memories(node)}
    changes = [0] * (len(nodes) + 1)
    for one in lifetimes(nodes):
        if one.memory in stays:
            continue
        changes[one.begin] += one.nbytes
        changes[one.end] -= one.nbytes
    live = list(accumulate(changes))
    return live.index(max(live)) + 1 if nodes else 0
