"""Lays out a step's temporaries in one buffer, in which each has space while it is needed.

The result says how little memory an allocator could use; the step's memory is not laid out so.
Temporaries that are needed at the same time must not overlap, all others may. They are placed one
after the other, each at the lowest free offset, in a few orders. The best result counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from storm_client.step.temporaries import Temporary, most_at_once

__all__ = ["Layout", "laid_out"]

ALIGNMENT_BYTES = 64
"""PyTorch's allocator for CPUs aligns tensors to this, and vector instructions read fastest
there."""

_ORDERS: tuple[Callable[[Temporary], Any], ...] = (
    lambda one: (-one.nbytes, one.begin),
    lambda one: (-one.nbytes * (one.end - one.begin), one.begin),
    lambda one: (one.begin - one.end, -one.nbytes),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of each temporary in the buffer."""

    offsets: tuple[int, ...]
    """In the order of the temporaries."""
    nbytes: int
    """Bytes of the buffer."""
    bound: int
    """Lower bound of any layout: the most bytes that are needed at one time."""

    def assert_invariants(self, temporaries: Sequence[Temporary]) -> None:
        """Check that no two temporaries share a byte at any time."""
        placed = list(zip(temporaries, self.offsets, strict=True))
        for number, (one, at) in enumerate(placed):
            assert at >= 0
            assert at % ALIGNMENT_BYTES == 0
            assert at + one.nbytes <= self.nbytes
            for other, there in placed[:number]:
                apart = at + one.nbytes <= there or there + other.nbytes <= at
                assert apart or not _meet(one, other)


def laid_out(temporaries: Sequence[Temporary]) -> Layout:
    """Return the best layout of those that are tried."""
    tried = (_placed(temporaries, order) for order in _ORDERS)
    offsets, nbytes = min(tried, key=lambda found: found[1])
    return Layout(tuple(offsets), nbytes, most_at_once(temporaries))


def _placed(
    temporaries: Sequence[Temporary], order: Callable[[Temporary], Any]
) -> tuple[list[int], int]:
    """Return offsets, and the bytes of the buffer."""
    offsets, top = [0] * len(temporaries), 0
    placed: list[int] = []
    for number in sorted(range(len(temporaries)), key=lambda n: order(temporaries[n])):
        one, at = temporaries[number], 0
        beside = (n for n in placed if _meet(one, temporaries[n]))
        for begin, end in sorted((offsets[n], offsets[n] + temporaries[n].nbytes) for n in beside):
            if begin >= at + one.nbytes:
                break
            at = max(at, -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        offsets[number], top = at, max(top, at + one.nbytes)
        placed.append(number)
    return offsets, top


def _meet(one: Temporary, other: Temporary) -> bool:
    return one.begin < other.end and other.begin < one.end
