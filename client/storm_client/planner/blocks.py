"""What checkpointing each block of a model would keep: the measure of how little may stay.

A block is a layer with a number, as "model.layers.3", and what checkpointing keeps of it is what it
is given: the last that the one before has made. Everything here is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

__all__ = ["block_ends"]

LEAST_MADE: Final = 4
"""Values of a block: a list of single functions is none of blocks."""

FEWEST: Final = 2
"""Blocks of one list, from which on they are taken to be what somebody would checkpoint."""


class Made(Protocol):
    """What is looked at of a value: where it was made, and from what."""

    layer: str
    nbytes: int
    is_expensive: bool
    inputs: tuple[int, ...]

    @property
    def is_saved(self) -> bool:
        """Whether autograd saves it."""
        ...


def block_ends(values: Sequence[Made]) -> frozenset[int]:
    """Return the numbers of what is kept of the blocks of a step; none where there are no blocks.

    `values` are those of the step, in their order. Where a block ends with a norm of what is saved
    anyway, it is that: the norm is recomputed sooner than offloaded.
    """
    layers = enumerate(value.layer for value in values)
    last = {layer: n for n, layer in layers if layer.rpartition(".")[2].isdecimal()}
    made = Counter(value.layer for value in values)
    last = {layer: n for layer, n in last.items() if made[layer] >= LEAST_MADE}
    lists = Counter(layer.rpartition(".")[0] for layer in last)
    ends = [n for layer, n in last.items() if lists[layer.rpartition(".")[0]] >= FEWEST]
    return frozenset(_made_from(number, values) for number in ends)


def _made_from(number: int, values: Sequence[Made]) -> int:
    """Return what a value is made from by cheap operations of one saved input each, or itself."""
    while True:
        value = values[number]
        inputs = {n for n in value.inputs if n >= 0}
        if value.is_expensive or len(inputs) != 1:
            return number
        (source,) = inputs
        origin = values[source]
        is_less = source < number and origin.nbytes <= value.nbytes
        if not (is_less and origin.is_saved and origin.layer == value.layer):
            return number
        number = source
