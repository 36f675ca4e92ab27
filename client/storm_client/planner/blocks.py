"""What checkpointing each block of a model would keep: the measure of how little may stay.

A block is a layer with a number, as "model.layers.3", and what checkpointing keeps of it is what it
is given: the last that the one before has made. Everything here is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["checkpointed_bytes"]

FEWEST: int = 2
"""Blocks of one list, from which on they are taken to be what somebody would checkpoint."""


def checkpointed_bytes(made: Iterable[tuple[str, int]]) -> int | None:
    """Return how many bytes it keeps of the blocks of a step; None where there are none.

    `made` has for each value the layer in which it was made and its bytes, in their order.
    """
    last = {layer: nbytes for layer, nbytes in made if layer.rpartition(".")[2].isdecimal()}
    lists = Counter(layer.rpartition(".")[0] for layer in last)
    blocks = [n for layer, n in last.items() if lists[layer.rpartition(".")[0]] >= FEWEST]
    return sum(blocks) if blocks else None
