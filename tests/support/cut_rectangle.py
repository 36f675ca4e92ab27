"""Blocks that are known to fit with no gap: the pieces of a rectangle of times and bytes."""

from __future__ import annotations

import random

from storm_client.compile.layout import Block

__all__ = ["HEIGHT", "pieces"]

HEIGHT = 4096
"""Bytes, which some layout of any pieces needs and no layout is below."""
TIMES = 48


def pieces(seed: int, count: int, step: int = 1) -> list[Block]:
    """Cut the rectangle into so many blocks, whose bytes and alignment are multiples of a step."""
    chosen = random.Random(seed)
    found = [(0, TIMES, HEIGHT)]
    while len(found) < count:
        areas = [(end - begin) * size for begin, end, size in found]
        begin, end, size = found.pop(chosen.choices(range(len(found)), areas)[0])
        if chosen.random() < 0.5 and end - begin > 1:
            cut = chosen.randrange(begin + 1, end)
            found += [(begin, cut, size), (cut, end, size)]
        elif size > step:
            cut = chosen.randrange(step, size, step)
            found += [(begin, end, cut), (begin, end, size - cut)]
        else:
            found.append((begin, end, size))
    chosen.shuffle(found)
    return [Block(*one, alignment=step) for one in found]
