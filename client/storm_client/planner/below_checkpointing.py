"""Keeps as many values as fit under the peak memory of the same step with its blocks checkpointed.

A kept value occupies memory from its making to its first use. So the free bytes differ at each
moment of the backward pass: when gradients of parameters fill memory, the last blocks are freed
already. Bytes in flight use a part of these free bytes, here called room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter, sub
from typing import Final

from storm_client.planner.decisions import Decision, Keep, Offload
from storm_client.planner.in_flight import in_flight_bytes
from storm_client.planner.machine import Machine
from storm_client.planner.problem import Problem, Value
from storm_client.planner.solver import Choice, Solver
from storm_client.planner.timeline import (
    Timeline,
    checkpointed,
    kept_by_checkpointing,
    needed_between,
    planned,
)

__all__ = ["choose_below_checkpointing", "is_below_checkpointing", "room_below_checkpointing"]

LOSS_COPIES: Final = 7
"""Memory of a loss for half-precision logits, as a multiple of their bytes. In single precision the
logits, their softmax and its gradient take two each; the gradient of the logits takes one."""

STARTS: Final = 12
"""The most shares of the checkpointed peak from whose best choices the search begins, too. What
fits depends on the moment, so each leads to another result."""

EFFORT: Final = 6000
"""The most values to choose for, from all shares together: a block waits for its plan."""


def choose_below_checkpointing(problem: Problem, machine: Machine) -> Choice:
    """Return a choice that keeps what pays most, up to the peak of the checkpointed step.

    It keeps as many bytes as checkpointing the blocks does, less what devices were short of. It
    keeps no more if the memory in use at each moment is unknown. Otherwise there are several
    starting points: the values of that many bytes that pay most, those that checkpointing keeps,
    which offloads next to nothing, and the values that pay most of shares of the checkpointed peak.
    All are extended; the fastest result below the checkpointed peak is returned.
    """
    solver = Solver(problem, machine)
    best = solver.choose(max(0, problem.checkpointed_bytes - problem.lacked_bytes))
    if not _is_known(problem):
        return best
    most = checkpointed(problem)
    found = [_keeping_what_fits(solver, problem, best, most)]
    begun = solver.choose(0, kept=kept_by_checkpointing(problem))
    if not problem.lacked_bytes and min(planned(problem, begun.decisions).room_below(most)) >= 0:
        found.append(_keeping_what_fits(solver, problem, begun, most))
    every = chain(found, _from_shares(solver, problem, most))
    fitting = [one for one in every if min(_room(problem, one, most)) >= 0]
    return min(fitting or found, key=attrgetter("seconds"))


def _from_shares(solver: Solver, problem: Problem, most: Timeline) -> Iterator[Choice]:
    """Yield what the best choices for shares of the checkpointed peak lead to."""
    known: list[list[Decision]] = []
    parts = min(STARTS, EFFORT // len(problem.values)) + 1
    for part in range(1, parts):
        begun = solver.choose(most.peak_bytes * part // parts)
        if begun.decisions not in known:
            known.append(begun.decisions)
            yield _keeping_what_fits(solver, problem, begun, most)


def _lacking(allowed: Sequence[int], room: Sequence[int]) -> int:
    """Return how many bytes a choice is short of the room that it must leave; negative if none."""
    return max(least - nbytes for least, nbytes in zip(allowed, room, strict=True))


def is_below_checkpointing(problem: Problem, choice: Choice) -> bool:
    """Return whether a step is known never to exceed its peak with its blocks checkpointed."""
    return _is_known(problem) and min(room_below_checkpointing(problem, choice)) >= 0


def room_below_checkpointing(problem: Problem, choice: Choice) -> list[int]:
    """Return how many more bytes fit at each moment under the checkpointed step's peak."""
    return _room(problem, choice, checkpointed(problem))


def _is_known(problem: Problem) -> bool:
    """Return whether the memory in use at each moment is known."""
    return bool(problem.block_ends and problem.recomputes and problem.used_between)


def _room(problem: Problem, choice: Choice, most: Timeline) -> list[int]:
    """Return how many more bytes may be kept at each moment under the peak of `most`."""
    room = planned(problem, choice.decisions).room_below(most)
    room[-1] -= _outside_bytes(problem)
    taken = (nbytes + problem.lacked_bytes for nbytes in _in_flight(problem, choice))
    return list(map(sub, room, taken))


def _in_flight(problem: Problem, choice: Choice) -> list[int]:
    """Return the most bytes in flight at each moment: offloaded values not restored yet."""
    coming, stored = [0] * (len(problem.values) + 2), _stored(problem, choice)
    for value in stored:
        first, _ = problem.used_between.get(value.number, (value.number, value.number))
        coming[first + 1] += value.nbytes
    limit = in_flight_bytes([value.nbytes for value in stored])
    return [min(limit, nbytes) for nbytes in accumulate(coming[:-1])]


def _stored(problem: Problem, choice: Choice) -> list[Value]:
    """Return the values that a choice offloads."""
    decided = zip(problem.values, choice.decisions, choice.costs, strict=True)
    return [value for value, one, cost in decided if cost and isinstance(one, Offload)]


def _in_flight_anyway(problem: Problem, choice: Choice) -> list[int]:
    """Return the offloaded values if all may be in flight at once, which frees nothing."""
    stored = _stored(problem, choice)
    sizes = [value.nbytes for value in stored]
    if sum(sizes) > in_flight_bytes(sizes):
        return []
    return [value.number for value in stored]


def _outside_bytes(problem: Problem) -> int:
    """Return the bytes of a loss outside of the block, which reads the last result if not saved."""
    made = [value for value in problem.values if not value.is_given]
    return 0 if not made or made[-1].is_saved else LOSS_COPIES * made[-1].nbytes


def _keeping_what_fits(solver: Solver, problem: Problem, choice: Choice, most: Timeline) -> Choice:
    """Return a choice that also keeps values for which there is room until they are used.

    Then less is recomputed or in flight. So the other decisions are made anew, as long as that
    saves time. Where the first choice exceeds the peak, the result may exceed it equally: so values
    that fit at other moments can still be kept.
    """
    room = _room(problem, choice, most)
    allowed = [min(0, nbytes) for nbytes in room]
    while True:
        choice = _filled(solver, problem, choice, most, room=room, allowed=allowed)
        kept = {n for n, one in enumerate(choice.decisions) if isinstance(one, Keep)}
        again = solver.choose(0, kept=kept)
        room = _room(problem, again, most)
        if _lacking(allowed, room) > 0 or again.seconds >= choice.seconds:
            return choice
        choice = again


def _filled(
    solver: Solver,
    problem: Problem,
    choice: Choice,
    most: Timeline,
    *,
    room: Sequence[int],
    allowed: Sequence[int],
) -> Choice:
    """Return a choice that also keeps values that fit into `room`, the room that `choice` leaves.

    All other decisions are unchanged. The result leaves at least the `allowed` room.
    """
    more = _fitting(problem, choice, room)
    while more or (more := _in_flight_anyway(problem, choice)):
        found = solver.with_kept(choice, more)
        left = _room(problem, found, most)
        if _lacking(allowed, left) <= 0:
            choice, more = found, _fitting(problem, found, left)
        elif len(more) > 1:
            more = more[: len(more) // 2]
        else:
            break
    return choice


def _fitting(problem: Problem, choice: Choice, room: Sequence[int]) -> list[int]:
    """Return the values that fit, of those saved or offloaded: first what costs most per byte.

    Values whose first use is at a moment with negative room precede them: if such a value is kept,
    nothing is recomputed for it at that moment. A value that others are recomputed from is in
    memory from then on, kept or not.
    """
    left, found = list(room), []
    needed, used = needed_between(problem, choice.decisions), problem.used_between

    def order(number: int) -> tuple[bool, float, int]:
        spared = choice.costs[number] / problem.values[number].nbytes
        return room[used.get(number, needed[number])[0]] < 0, spared, number

    costly = {value.number for value in (*problem.saved, *_stored(problem, choice))}
    for number in sorted(filter(choice.costs.__getitem__, costly), key=order, reverse=True):
        begin = needed[number][0] + 1
        nbytes = problem.values[number].nbytes
        if min(left[begin:], default=nbytes) >= nbytes:
            left[begin:] = [one - nbytes for one in left[begin:]]
            found.append(number)
    return found
