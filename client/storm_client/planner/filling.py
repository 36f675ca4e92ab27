"""Keeps as much of a step as lies below what checkpointing its blocks takes at its fullest moment.

A kept value lies there from its making to its first use, so each moment of the backward pass has
its own room: the last blocks are gone when gradients of parameters fill it. What is in flight has
its part of that room.

Everything here is pure: no tensor, device or clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import Final

from storm_client.planner.decisions import Keep, Offload
from storm_client.planner.in_flight import in_flight_bytes
from storm_client.planner.machine import Machine
from storm_client.planner.problem import Problem, Value
from storm_client.planner.solver import Choice, Solver
from storm_client.planner.timeline import (
    Timeline,
    asked_between,
    checkpointed,
    kept_by_checkpointing,
    planned,
)

__all__ = ["choose_below_checkpointing", "is_below_checkpointing", "room_below_checkpointing"]

TRIES: Final = 4
"""Budgets that are looked at, of which each is less by what the one before it lacked."""

LOSS_COPIES: Final = 7
"""Times the bytes of logits in half precision that a loss takes for them in single precision: twice
as many for themselves, their softmax and its gradient, and once for the gradient of the logits."""


def choose_below_checkpointing(problem: Problem, machine: Machine) -> Choice:
    """Return a choice that keeps what pays most, so much that the step is as full as checkpointed.

    It keeps as many bytes as checkpointing its blocks in any case, less what devices have lacked,
    and no more if it is not known what there is at each moment. If it is, there are two starting
    points: as many bytes of what pays most, and what checkpointing itself keeps, which puts next to
    nothing on the link. Of what comes of them the faster counts that is never fuller.
    """
    solver = Solver(problem, machine)
    best = solver.choose(max(0, problem.checkpointed_bytes - problem.lacked_bytes))
    if not _is_known(problem):
        return best
    most = checkpointed(problem)
    found = [_as_full(solver, problem, best, most)]
    kept = {n for n in kept_by_checkpointing(problem) if problem.values[n].is_saved}
    begun = solver.choose(0, stays=kept)
    if not problem.lacked_bytes and min(planned(problem, begun.decisions).room_below(most)) >= 0:
        found.append(_keeping_what_fits(solver, problem, begun, most))
    return min(found, key=lambda one: (min(_room(problem, one, most)) < 0, one.seconds))


def _as_full(solver: Solver, problem: Problem, best: Choice, most: Timeline) -> Choice:
    """Return a choice that goes on from the `best` by bytes to what there is room for."""
    room = _room(problem, best, most)
    allowed, budget = _at_least(room), best.kept_bytes + room[-1]
    for _ in range(TRIES):
        if budget <= best.kept_bytes:
            break
        tried = solver.choose(budget)
        lacking = max(map(sub, allowed, _room(problem, tried, most)))
        if lacking <= 0:
            best = tried
            break
        budget = tried.kept_bytes - lacking
    return _keeping_what_fits(solver, problem, best, most)


def _at_least(room: Sequence[int]) -> list[int]:
    """Return how much room a choice has to leave that goes on from one with so much.

    What is fuller as it is may stay so, and does not keep others from what there is room for.
    """
    return [min(0, nbytes) for nbytes in room]


def is_below_checkpointing(problem: Problem, choice: Choice) -> bool:
    """Tell whether a step is known to be never fuller than with its blocks checkpointed."""
    return _is_known(problem) and min(room_below_checkpointing(problem, choice)) >= 0


def room_below_checkpointing(problem: Problem, choice: Choice) -> list[int]:
    """Return how many bytes more there may be at each moment to be never fuller than that."""
    return _room(problem, choice, checkpointed(problem))


def _is_known(problem: Problem) -> bool:
    """Tell whether it is known what there is at each moment."""
    return bool(problem.block_ends and problem.recomputes and problem.used_between)


def _room(problem: Problem, choice: Choice, most: Timeline) -> list[int]:
    """Return how many bytes more may be kept at each moment, to be never fuller than `most`."""
    room = planned(problem, choice.decisions).room_below(most)
    room[-1] -= _outside_bytes(problem)
    taken = (nbytes + problem.lacked_bytes for nbytes in _in_flight(problem, choice))
    return list(map(sub, room, taken))


def _in_flight(problem: Problem, choice: Choice) -> list[int]:
    """Return how much is in flight at the most at each moment: of what has not come back yet."""
    coming, stored = [0] * (len(problem.values) + 2), _stored(problem, choice)
    for value in stored:
        first, _ = problem.used_between.get(value.number, (value.number, value.number))
        coming[first + 1] += value.nbytes
    limit = in_flight_bytes([value.nbytes for value in stored])
    return [min(limit, nbytes) for nbytes in accumulate(coming[:-1])]


def _stored(problem: Problem, choice: Choice) -> list[Value]:
    """Return what a choice offloads."""
    decided = zip(problem.values, choice.decisions, choice.costs, strict=True)
    return [value for value, one, cost in decided if cost and isinstance(one, Offload)]


def _in_flight_anyway(problem: Problem, choice: Choice) -> list[int]:
    """Return what is offloaded where all of it may be in flight at once, which frees nothing."""
    stored = _stored(problem, choice)
    sizes = [value.nbytes for value in stored]
    if sum(sizes) > in_flight_bytes(sizes):
        return []
    return [value.number for value in stored if value.is_saved]


def _outside_bytes(problem: Problem) -> int:
    """Return what a loss outside of the block may take: of a result that nothing inside needs."""
    made = [value for value in problem.values if not value.is_given]
    return 0 if not made or made[-1].is_saved else LOSS_COPIES * made[-1].nbytes


def _keeping_what_fits(solver: Solver, problem: Problem, choice: Choice, most: Timeline) -> Choice:
    """Return a choice that keeps besides what there is room for until it is used.

    With that less is recomputed or in flight, so the others may be chosen anew, as long as that
    spares time.
    """
    allowed = _at_least(_room(problem, choice, most))
    while True:
        choice = _filled(solver, problem, choice, most, allowed)
        kept = {n for n, one in enumerate(choice.decisions) if isinstance(one, Keep)}
        again = solver.choose(0, stays=kept)
        lacking = max(map(sub, allowed, _room(problem, again, most)))
        if lacking > 0 or again.seconds >= choice.seconds:
            return choice
        choice = again


def _filled(
    solver: Solver, problem: Problem, choice: Choice, most: Timeline, allowed: Sequence[int]
) -> Choice:
    """Return a choice that keeps besides what there is room for, and decides alike of all others.

    It leaves as much room as is `allowed`.
    """
    room = _room(problem, choice, most)
    more = _fitting(problem, choice, room)
    while more or (more := _in_flight_anyway(problem, choice)):
        found = solver.keeping(choice, more)
        left = _room(problem, found, most)
        if max(map(sub, allowed, left)) > 0:
            more = more[: len(more) // 2]
            if not more:
                break
            continue
        choice, room = found, left
        more = _fitting(problem, choice, room)
    return choice


def _fitting(problem: Problem, choice: Choice, room: Sequence[int]) -> list[int]:
    """Return what fits of what is not kept, first what costs most for its bytes.

    Before that comes what is used first where there is too little room: if it stays, nothing is
    recomputed for it there. What is asked for anyway, for others to be recomputed from, lies there
    from then on, kept or not.
    """
    left, found = list(room), []
    asked, used = asked_between(problem, choice.decisions), problem.used_between

    def order(number: int) -> tuple[bool, float, int]:
        spared = choice.costs[number] / problem.values[number].nbytes
        return room[used[number][0]] < 0, spared, number

    numbers = (value.number for value in problem.saved if choice.costs[value.number])
    for number in sorted(numbers, key=order, reverse=True):
        begin = asked[number][0] + 1
        nbytes = problem.values[number].nbytes
        if min(left[begin:], default=nbytes) >= nbytes:
            left[begin:] = [one - nbytes for one in left[begin:]]
            found.append(number)
    return found
