"""How much device memory a step takes at each of its moments, by a plan or with checkpointing.

A forward pass makes a step's values in their order, and a backward pass undoes them in reverse. So
the moments of both have the numbers of the values; that of the loss, where the one ends and the
other begins, is one more than the last. At each there are:

- what is kept, from where it is made to its last use;
- in the forward pass what an operation still reads;
- in the backward pass what was offloaded or is recomputed, from its first use to its last, and what
  that is made from;
- the gradients of values, from the first that depends on one to the operation that made it;
- the gradients of parameters, from the last operation that reads one to the end of the step;
- parameters that are gathered for a block, beside those of the block that comes next, and in the
  backward pass their gradients, and those of the block before, which are reduced.

Checkpointing keeps what its blocks are given and what no block makes, and recomputes all else that
a block saves where its backward pass begins. Its loss is PyTorch's own, where a plan's is computed
in tiles.

Memory that an operation needs while it runs is not counted, nor what is in flight: no plan decides
about the one, and of the other `in_flight.py` knows the limit.

Everything here is pure: no tensor, device or clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from operator import add

from storm_client.planner.decisions import Decision, Keep, Replay
from storm_client.planner.problem import Problem

__all__ = ["Timeline", "asked_between", "checkpointed", "kept_by_checkpointing", "planned"]


@dataclass(frozen=True)
class Timeline:
    """Bytes on the device at each moment of a step."""

    forward: list[int]
    """While each value is made."""
    backward: list[int]
    """By the same numbers while it is undone, and at the end for the loss; without the next."""
    gradients: list[int]
    """Of parameters, which have come to be by then, if none were there before the step."""
    finds_gradients: bool = True
    """Whether there may be some."""

    @property
    def fullest(self) -> int:
        """What there is at the most in a step that finds no gradients of parameters."""
        return max(*self.forward, *self._with(self.gradients))

    @property
    def fullest_beside_gradients(self) -> int:
        """The same in a step that finds all of them, without those: it adds new ones to them."""
        return max(*self.forward, *self._with(self._new))

    def room_below(self, other: Timeline) -> list[int]:
        """Return how many bytes more may lie here at each moment of the backward pass.

        So many that this step is never fuller than the other at its fullest, whether it finds
        gradients of parameters or not, if it may. Where it is fuller as it is they are negative.
        """
        first, later = other.fullest, other.fullest_beside_gradients
        new = [first - filling for filling in self._with(self.gradients)]
        if not self.finds_gradients:
            return new
        return [
            min(one, later - adding) for one, adding in zip(new, self._with(self._new), strict=True)
        ]

    @property
    def _new(self) -> list[int]:
        """The gradients that come to be at each moment."""
        return [own - before for own, before in pairwise([*self.gradients, 0])]

    def _with(self, gradients: list[int]) -> list[int]:
        return list(map(add, self.backward, gradients))


def planned(problem: Problem, decisions: Iterable[Decision]) -> Timeline:
    """Return what a step takes that follows these decisions."""
    decided = list(zip(problem.values, decisions, strict=True))
    kept = {value.number for value, one in decided if isinstance(one, Keep) and value.is_saved}
    recomputed = {value.number for value, one in decided if isinstance(one, Replay)}
    return _timeline(problem, kept, recomputed, _when_asked)


def asked_between(problem: Problem, decisions: Iterable[Decision]) -> dict[int, tuple[int, int]]:
    """Return at which moments of the backward pass a plan asks for each value first and last.

    Autograd asks for what it has saved, and what is recomputed for what it is made from.
    """
    decided = zip(problem.values, decisions, strict=True)
    recomputed = {value.number for value, one in decided if isinstance(one, Replay)}
    return _spans(problem, recomputed, _when_asked)


def _when_asked(number: int) -> int:
    """Return that a plan recomputes a saved value no earlier than it is asked for."""
    return number


def checkpointed(problem: Problem) -> Timeline:
    """Return what it takes if each block is checkpointed; the problem knows its blocks."""
    ends = sorted(problem.block_ends)
    kept = kept_by_checkpointing(problem)
    recomputed = set(range(len(problem.values))) - kept
    found = _timeline(problem, kept, recomputed, lambda number: ends[bisect_left(ends, number)])
    found.backward[-1] += problem.plain_loss_bytes
    return found


def kept_by_checkpointing(problem: Problem) -> frozenset[int]:
    """Return the numbers of what checkpointing each block would keep, inside of blocks or not.

    That is what is saved behind all blocks, what another block saves than the one that made it, and
    what there is before anything is made.
    """
    ends = sorted(problem.block_ends)
    given = takewhile(lambda value: value.is_given, problem.values)
    found = problem.block_ends.union(value.number for value in given if value.is_saved)
    for value in problem.saved:
        first, last = problem.used_between.get(value.number, (value.number, value.number))
        made = last if value.is_given else value.number
        blocks = {bisect_left(ends, moment) for moment in (first, last, made)}
        if len(blocks) > 1 or len(ends) in blocks:
            found |= {value.number}
    return found


def _timeline(
    problem: Problem, kept: Set[int], recomputed: Set[int], begin: Callable[[int], int]
) -> Timeline:
    """Return what a step takes; a saved value is recomputed no later than `begin` says."""
    new = [value.parameter_bytes for value in reversed(problem.values)]
    forward, backward = _gathered(problem)
    return Timeline(
        list(map(add, forward, _forward(problem, kept))),
        list(map(add, backward, _backward(problem, kept, recomputed, begin))),
        [*reversed(list(accumulate(new))), 0],
        problem.finds_gradients,
    )


def _gathered(problem: Problem) -> tuple[list[int], list[int]]:
    """Return the bytes of gathered parameters and their gradients at the moments of both passes."""
    ends, sizes = sorted(problem.block_ends), Counter[int]()
    blocks = [bisect_left(ends, moment) for moment in range(len(problem.values) + 1)]
    for value in problem.values:
        sizes[blocks[value.number]] += value.gathered_bytes
    forward = [sizes[one] + sizes[one + 1] for one in blocks[:-1]]
    return forward, [2 * sizes[one] + sizes[one - 1] + sizes[one + 1] for one in blocks]


def _forward(problem: Problem, kept: Set[int]) -> list[int]:
    values = problem.values
    last_reader = {value.number: value.number for value in values}
    for value in values:
        last_reader |= {
            one: max(value.number, last_reader[one]) for one in value.inputs if one >= 0
        }
    changes = [0] * (len(values) + 1)
    for number, reader in last_reader.items():
        changes[number] += values[number].nbytes
        if number not in kept:
            changes[reader + 1] -= values[number].nbytes
    return list(accumulate(changes))[:-1]


def _backward(
    problem: Problem, kept: Set[int], recomputed: Set[int], begin: Callable[[int], int]
) -> list[int]:
    values, spans = problem.values, _spans(problem, recomputed, begin)
    arriving: dict[int, list[int]] = {}
    leaving: dict[int, list[int]] = {}
    live = 0
    for number, (first, last) in spans.items():
        leaving.setdefault(last, []).append(number)
        if number in kept:
            live += values[number].nbytes
        else:
            arriving.setdefault(first, []).append(number)
    found = _gradients(problem)
    for moment in reversed(range(len(found))):
        chain = sorted(arriving[moment]) if moment in arriving else ()
        most, done = _recomputing(problem, chain, recomputed, spans)
        found[moment] += live + most
        live += sum(values[number].nbytes for number in chain if number not in done)
        gone = (number for number in leaving.get(moment, ()) if number not in done)
        live -= sum(values[number].nbytes for number in gone)
    return found


def _spans(
    problem: Problem, recomputed: Set[int], begin: Callable[[int], int]
) -> dict[int, tuple[int, int]]:
    """Return at which moments each value that is needed is asked for first and last."""
    found = dict(problem.used_between)
    for value in reversed(problem.values):
        span = found.get(value.number)
        if span is None or value.number not in recomputed:
            continue
        if value.number in problem.used_between:
            span = found[value.number] = max(span[0], begin(value.number)), span[1]
        for source in value.inputs:
            if source >= 0:
                first, last = found.get(source, (span[0], span[0]))
                found[source] = max(first, span[0]), min(last, span[0])
    return found


def _recomputing(
    problem: Problem, chain: Iterable[int], recomputed: Set[int], spans: dict[int, tuple[int, int]]
) -> tuple[int, set[int]]:
    """Return the most bytes while a chain arrives, in its order, and which are gone after it.

    That is what is needed for nothing but what is recomputed in that moment.
    """
    values, last_reader = problem.values, dict[int, int]()
    for number in chain:
        if number in recomputed:
            last_reader |= {source: number for source in values[number].inputs if source >= 0}
    passing = {number for number in last_reader if spans[number][0] == spans[number][1]}
    passing &= {number for number in chain if number not in problem.used_between}
    live = most = 0
    for number in chain:
        live += values[number].nbytes
        most = max(most, live)
        read = set(values[number].inputs) & passing if number in recomputed else ()
        live -= sum(values[one].nbytes for one in read if last_reader[one] == number)
    return most, passing


def _gradients(problem: Problem) -> list[int]:
    """Return the bytes of values' gradients at each moment."""
    readers = {value.number: value.number for value in problem.values if value.operation}
    for value in problem.values:
        for source in value.inputs:
            if source in readers:
                readers[source] = max(readers[source], value.number)
    changes = [0] * (len(problem.values) + 2)
    for number, reader in readers.items():
        changes[number] += problem.values[number].nbytes
        changes[reader + 1] -= problem.values[number].nbytes
    return list(accumulate(changes))[:-1]
