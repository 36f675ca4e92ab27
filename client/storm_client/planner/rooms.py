"""Memory below a step's peak in which its transfers may be, as far as the step has come.

A forward pass fills memory until its end, and a backward pass frees it. So at most moments there is
room below the peak, for sources that are held after a store and for what is prefetched. Bytes in
flight that need no room below the peak are limited in `in_flight.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from storm_client.planner.decisions import Decision, Offload, Replay
from storm_client.planner.problem import Problem
from storm_client.planner.timeline import Timeline, needed_between

__all__ = ["NO_ROOMS", "Room", "Rooms", "rooms_of"]


class Room(NamedTuple):
    """The room in one pass."""

    moved: tuple[int, ...] = (0,)
    """Bytes of the plan that have been stored (or restored and used) before each stage."""
    free: tuple[int, ...] = (0,)
    """Bytes below the peak in each stage."""
    total: int = 0
    """Bytes of the plan that are stored in a step."""

    def when(self, moved: int, total: int) -> int:
        """Return the free bytes in a step that has moved some of its `total` bytes."""
        if not (self.total and total):
            return 0
        size = total / self.total
        stage = bisect_right(self.moved, round(moved / size)) - 1
        return int(min(1.0, size) * self.free[max(0, stage)])


class Rooms(NamedTuple):
    """The room in both passes of a step."""

    forward: Room = Room()
    backward: Room = Room()


NO_ROOMS = Rooms()
"""There is no plan, so nothing is known about a step's peak."""


def rooms_of(problem: Problem, decisions: Sequence[Decision], timeline: Timeline) -> Rooms:
    """Return the rooms of a step that follows these decisions, of which `timeline` is the memory.

    A source in the forward pass is given up as soon as there is no room. What is prefetched stays
    until its use. So it has only the room that remains until the end of the backward pass.
    """
    values, needed = problem.values, needed_between(problem, decisions)
    read = {
        source
        for number, one in enumerate(decisions)
        if isinstance(one, Replay)
        for source in values[number].inputs
    }
    stored = [
        value
        for value, one in zip(values, decisions, strict=True)
        if isinstance(one, Offload) and (value.is_saved or value.number in read)
    ]
    total = sum(value.nbytes for value in stored)
    moments = [0, *(value.number for value in stored), len(values) - 1]
    free = timeline.free_in_forward()
    forward = Room(
        tuple(accumulate((value.nbytes for value in stored), initial=0)),
        tuple(min(free[begin : end + 1], default=0) for begin, end in pairwise(moments)),
        total,
    )
    used = sorted(
        (value for value in stored if value.number in needed),
        key=lambda value: needed[value.number][0],
        reverse=True,
    )
    free = timeline.free_to_the_end()
    backward = Room(
        tuple(accumulate((value.nbytes for value in used[:-1]), initial=0)),
        tuple(free[needed[value.number][0]] for value in used) or (0,),
        total,
    )
    return Rooms(forward, backward)
