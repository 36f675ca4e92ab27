"""Finds the blocks of a step by its data flow, where no layer's name shows them.

A joint is a value that everything later is made from, as far as it uses earlier values at all.
Blocks in a chain have joints between them. Blocks with residuals also have joints inside, as
between attention and what follows it. Blocks are found by repetition: joints divide a step into
segments, and segments in a row that run the same operations as the following ones form a block.

A value with many readers is an input of many blocks, as an encoder's output is: it separates
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from storm_client.planner.blocks import MIN_MADE
from storm_client.planner.prices import MadeValue

__all__ = ["repeated_ends"]

MANY_READERS: Final = 6
"""Reading operations: a value with more of them is an input of many blocks."""

MAX_SEGMENTS: Final = 8
"""Most segments of one block."""


def repeated_ends(values: Sequence[MadeValue]) -> frozenset[int]:
    """Return the numbers of the values that repeated blocks end with; none if nothing repeats.

    `values` are those of the step, in order. A block ends at the segment whose joints have the
    fewest bytes; of equal ones, at one whose joints are saved anyway. If the blocks are separated
    in any case, since nothing later is made from earlier values, there are none.
    """
    joints, breaks = _joints(values)
    segments = [
        tuple(one.operation for one in values[begin + 1 : end + 1] if one.operation)
        for begin, end in zip([-1, *joints], joints, strict=False)
    ]
    found, at = set[int](), 0
    while at < len(segments):
        length, total = max(
            ((n, _repeating(segments, at, n)) for n in range(1, MAX_SEGMENTS + 1)),
            key=lambda one: (one[1], -one[0]),
        )
        ends = _lightest(values, joints[at : at + total], length)
        parted = breaks.intersection(range(ends[0], ends[-1])) if ends else ()
        if len(parted) < len(ends) - 1:
            found.update(ends)
        at += max(total, 1)
    return frozenset(found)


def _lightest(values: Sequence[MadeValue], joints: Sequence[int], length: int) -> Sequence[int]:
    """Return one joint of each block, always at the same place in the block."""

    def order(numbers: Sequence[int]) -> tuple[float, float]:
        count = max(len(numbers), 1)
        unsaved = sum(not values[number].is_saved for number in numbers)
        return sum(values[number].nbytes for number in numbers) / count, unsaved / count

    return min((joints[place::length] for place in reversed(range(length))), key=order)


def _joints(values: Sequence[MadeValue]) -> tuple[list[int], set[int]]:
    """Return a step's joints in order, and the values after which no earlier value is read."""
    counts = Counter(source for value in values for source in set(value.inputs) if source >= 0)
    last_reader = {source: n for n, value in enumerate(values) for source in value.inputs}
    found, breaks, reached = list[int](), set[int](), -1
    for number, value in enumerate(values):
        last = last_reader.get(number, -1)
        parts_none = not value.operation or counts[number] > MANY_READERS
        if reached <= number and (parts_none or last < number):
            breaks.add(number)
        elif reached <= number:
            found.append(number)
        if not parts_none:
            reached = max(reached, last)
    return found, breaks


def _repeating(segments: Sequence[tuple[str, ...]], at: int, length: int) -> int:
    """Return how many segments from `at` on a repeated block covers; 0 if it has too few values."""
    block = segments[at : at + length]
    end = at + length
    while end < len(segments) and segments[end] == segments[end - length]:
        end += 1
    is_block = end >= at + 2 * length and sum(map(len, block)) >= MIN_MADE
    return end - at if is_block else 0
