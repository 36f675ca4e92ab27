"""Finds the blocks of a step by what is made from what, where no layer's name tells them.

A joint is a value that all that follows is made from, if anything of what came before. A chain of
blocks has joints between them, and one with residuals others inside, as between attention and what
follows it. What repeats is a block: joints part a step into segments, of which some in a row run
the same operations as those behind them.

What many operations read is given to many blocks, as what an encoder has made: it parts nothing.
Everything here is pure: no tensor, device or clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from storm_client.planner.blocks import LEAST_MADE

__all__ = ["repeated_ends"]

MANY_READERS: Final = 6
"""Operations: what more read is given to many blocks."""

MOST_SEGMENTS: Final = 8
"""Of one block."""


class Made(Protocol):
    """What is looked at of a value: what has made it, and from what."""

    operation: str
    nbytes: int
    inputs: tuple[int, ...]

    @property
    def is_saved(self) -> bool:
        """Whether autograd saves it."""
        ...


def repeated_ends(values: Sequence[Made]) -> frozenset[int]:
    """Return the numbers of what blocks end with that repeat; none where nothing does.

    `values` are those of the step, in their order. Of a block's segments that is the last whose
    joints have the fewest bytes, and are saved anyway. Where blocks are parted as it is, since
    nothing is recomputed from what comes before, there are none.
    """
    joints, breaks = _joints(values)
    segments = [
        tuple(one.operation for one in values[begin + 1 : end + 1] if one.operation)
        for begin, end in zip([-1, *joints], joints, strict=False)
    ]
    found, at = set[int](), 0
    while at < len(segments):
        length, total = max(
            ((n, _repeating(segments, at, n)) for n in range(1, MOST_SEGMENTS + 1)),
            key=lambda one: (one[1], -one[0]),
        )
        ends = _lightest(values, joints[at : at + total], length)
        parted = breaks.intersection(range(ends[0], ends[-1])) if ends else ()
        if len(parted) < len(ends) - 1:
            found.update(ends)
        at += max(total, 1)
    return frozenset(found)


def _lightest(values: Sequence[Made], joints: Sequence[int], length: int) -> Sequence[int]:
    """Return one of so many joints each time, always the same in its block."""

    def order(numbers: Sequence[int]) -> tuple[float, float]:
        count = max(len(numbers), 1)
        unsaved = sum(not values[number].is_saved for number in numbers)
        return sum(values[number].nbytes for number in numbers) / count, unsaved / count

    return min((joints[place::length] for place in reversed(range(length))), key=order)


def _joints(values: Sequence[Made]) -> tuple[list[int], set[int]]:
    """Return the joints of a step, in their order, and behind which values nothing is read."""
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
    """Return how many segments from one on repeat those `length` before; 0 for too few values."""
    block = segments[at : at + length]
    end = at + length
    while end < len(segments) and segments[end] == segments[end - length]:
        end += 1
    is_block = end >= at + 2 * length and sum(map(len, block)) >= LEAST_MADE
    return end - at if is_block else 0
