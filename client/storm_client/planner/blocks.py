"""Finds what checkpointing each block of a model would keep: the reference for a plan's memory.

A block is a layer with a number, as "model.layers.3". Checkpointing keeps the block's input: the
last value that the block before makes. Frozen layers that are given no gradient are no blocks.
Blocks may be nested, as in the stages of an image model. The inner ones are used if the input of
each is made by the one before it, and if they need less memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from storm_client.eager.events import RecordedValue

__all__ = ["block_ends", "numbered_layers"]

MIN_MADE: Final = 4
"""Fewest values of a block: a list of single functions does not consist of blocks."""

FEWEST: Final = 2
"""Fewest blocks of one list that a user would probably checkpoint."""


def block_ends(values: Sequence[RecordedValue]) -> frozenset[int]:
    """Return the numbers of the values that checkpointing keeps; none where there are no blocks.

    `values` are those of the step, in order. If a block ends with a norm of a value that is saved
    anyway, the result has this value instead: the norm is recomputed rather than offloaded.
    """
    around = [[] if one.is_made_inside else list(numbered_layers(one.path)) for one in values]
    outer = [names[0] if names else "" for names in around]
    inner = [names[1] if len(names) > 1 else "" for names in around]
    lasts = _lasts(outer)
    finer = {block: _chained(block, values, outer, inner) for block in lasts}
    if any(finer.values()):
        within = [
            name if name in finer.get(block, ()) else block
            for block, name in zip(outer, inner, strict=True)
        ]
        found = {name: last for block in lasts for name, last in finer[block].items()}
        found |= {block: last for block, last in lasts.items() if not finer[block]}
        if _taken(found, within, values) < _taken(lasts, outer, values):
            outer, lasts = within, found
    return frozenset(_made_from(number, values, outer) for number in lasts.values())


def numbered_layers(path: str) -> Iterator[str]:
    """Yield the names of the numbered layers that contain a module, the outermost first."""
    parts = path.split(".")
    for prefix, part in zip(accumulate(parts, "{}.{}".format), parts, strict=True):
        if part.isdecimal():
            yield prefix


def _lasts(names: Sequence[str]) -> dict[str, int]:
    """Return each block's last value, by name; `names` has each value's block, or "" for none."""
    made = Counter(names)
    last = {name: n for n, name in enumerate(names) if name and made[name] >= MIN_MADE}
    lists = Counter(name.rpartition(".")[0] for name in last)
    return {name: n for name, n in last.items() if lists[name.rpartition(".")[0]] >= FEWEST}


def _chained(
    block: str, values: Sequence[RecordedValue], outer: Sequence[str], inner: Sequence[str]
) -> dict[str, int]:
    """Return the last values of a block's inner blocks; none unless each continues the one before.

    The experts of a layer do not, nor do halves of which one reads earlier values of others. What
    is made between two inner blocks, as where a skip connection joins, belongs to the second. All
    may read a value that no operation is known to recompute: it is stored in any case.
    """
    numbers = [n for n, name in enumerate(outer) if name == block]
    begin = numbers[0]
    lasts = _lasts([inner[n] for n in numbers])
    lasts = {name: numbers[last] for name, last in lasts.items()}
    for (before, end), (_, last) in pairwise(lasts.items()):
        sources = {n for number in range(end + 1, last + 1) for n in values[number].inputs}
        others = {n for n in sources if begin <= n <= end and values[n].operation}
        if last < end or any(inner[n] != before for n in others):
            return {}
    return lasts


def _taken(lasts: dict[str, int], names: Sequence[str], values: Sequence[RecordedValue]) -> int:
    """Return the bytes that blocks keep, plus the saved bytes of the largest block."""
    saved: Counter[str] = Counter()
    for name, value in zip(names, values, strict=True):
        saved[name] += value.nbytes * value.is_saved
    kept = sum(values[last].nbytes for last in lasts.values())
    return kept + max((saved[name] for name in lasts), default=0)


def _made_from(number: int, values: Sequence[RecordedValue], names: Sequence[str]) -> int:
    """Return the saved value that a value is made from by cheap one-input operations, or itself."""
    while True:
        value = values[number]
        inputs = {n for n in value.inputs if n >= 0}
        if value.is_expensive or len(inputs) != 1:
            return number
        (source,) = inputs
        origin = values[source]
        is_less = source < number and origin.nbytes <= value.nbytes
        if not (is_less and origin.is_saved and names[source] == names[number]):
            return number
        number = source
