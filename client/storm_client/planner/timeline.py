"""The device memory of a step at each of its moments, by a plan or with checkpointing.

A forward pass makes a step's values in order, and the backward pass runs their operations backward
in reverse order. So a moment of either pass has the number of a value. The moment of the loss,
between both passes, is one more than the last number. At each moment, memory holds:

- kept values, from the moment they are made to their last use. Of those that no operation made,
  recomputation reads copies, since nothing counts their changes;
- in the forward pass, values that an operation still reads, and casts of parameters, which autocast
  frees at its end;
- in the backward pass, offloaded and recomputed values from their first use to their last, and the
  inputs of recomputed values;
- gradients of values, from the first operation that contributes to one to the operation that made
  the value;
- gradients of parameters, from the last operation that reads a parameter to the end of the step;
- parameters that are gathered for a block, and those of the next block; in the backward pass also
  their gradients, and those of the block before, which are being reduced.

Checkpointing keeps the inputs of its blocks and values that no block makes. It recomputes
everything else that a block saves when the backward pass of the block begins. Its loss is
PyTorch's own, while a plan's loss is computed in tiles.

Two kinds of memory are not counted. Workspace of running operations does not depend on a plan. For
memory in flight, `in_flight.py` knows the limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from operator import add

from storm_client.planner.decisions import Decision, Keep, Replay
from storm_client.planner.problem import Problem

__all__ = ["Timeline", "checkpointed", "kept_by_checkpointing", "needed_between", "planned"]


@dataclass(frozen=True)
class Timeline:
    """Bytes on the device at each moment of a step."""

    forward: list[int]
    """While each value is made."""
    backward: list[int]
    """While each value's operation runs backward, and last for the loss; without parameter
    gradients."""
    gradients: list[int]
    """Bytes of parameter gradients at each backward moment, if none existed before the step."""
    finds_gradients: bool = True
    """Whether gradients may exist before the step."""

    @property
    def peak_bytes(self) -> int:
        """The peak of a step that finds no parameter gradients."""
        return max(*self.forward, *self._with(self.gradients))

    @property
    def peak_bytes_beside_gradients(self) -> int:
        """The peak if all gradients exist before, without these: the step adds new ones to them."""
        return max(*self.forward, *self._with(self._new))

    def room_below(self, other: Timeline) -> list[int]:
        """Return how many more bytes may be kept at each moment of the backward pass.

        With so many, this step's peak is not above that of the other, with existing parameter
        gradients (if the step may find any) and without. What is kept at a moment of the backward
        pass was in memory at that moment of the forward pass, too. A result is negative where this
        step exceeds that already.
        """
        peak = other.peak_bytes
        new = [peak - most for most in self._most(self.gradients)]
        if not self.finds_gradients:
            return new
        later = other.peak_bytes_beside_gradients
        return list(map(min, new, (later - most for most in self._most(self._new))))

    def _most(self, gradients: list[int]) -> list[int]:
        """Return the more of the bytes at each moment of the forward and of the backward pass."""
        return list(map(max, self._with(gradients), [*self.forward, 0]))

    @property
    def _new(self) -> list[int]:
        """The parameter gradients that are created at each moment."""
        return [own - before for own, before in pairwise([*self.gradients, 0])]

    def _with(self, gradients: list[int]) -> list[int]:
        return list(map(add, self.backward, gradients))


def planned(problem: Problem, decisions: Sequence[Decision]) -> Timeline:
    """Return the timeline of a step that follows these decisions."""
    recomputed = _recomputed(decisions)
    inputs = _inputs(problem, recomputed)
    needed = inputs.union(value.number for value in problem.saved)
    kept = {number for number in needed if isinstance(decisions[number], Keep)}
    found = _timeline(problem, kept, recomputed, _when_needed)
    copies = _copies(problem, kept & inputs)
    return replace(
        found,
        forward=list(map(add, found.forward, copies)),
        backward=list(map(add, found.backward, copies)),
    )


def _inputs(problem: Problem, recomputed: Set[int]) -> set[int]:
    """Return the numbers of the values from which others are recomputed."""
    sources = (source for number in recomputed for source in problem.values[number].inputs)
    return {source for source in sources if source >= 0}


def _copies(problem: Problem, read: Set[int]) -> list[int]:
    """Return the bytes of copies of `read` values at each moment: of those no operation made."""
    sizes = (one.nbytes * (one.is_given and one.number in read) for one in problem.values)
    copied = list(accumulate(sizes))
    return [*copied, *copied[-1:]]


def needed_between(problem: Problem, decisions: Sequence[Decision]) -> dict[int, tuple[int, int]]:
    """Return the first and last backward moment at which a plan needs each value.

    Autograd needs the values that it saved, and recomputed values need their inputs.
    """
    return _spans(problem, _recomputed(decisions), _when_needed)


def _recomputed(decisions: Sequence[Decision]) -> set[int]:
    """Return the numbers of the values that a plan recomputes."""
    return {number for number, one in enumerate(decisions) if isinstance(one, Replay)}


def _when_needed(number: int) -> int:
    """Return the moment itself: a plan recomputes a saved value only when it is needed."""
    return number


def checkpointed(problem: Problem) -> Timeline:
    """Return the timeline if each block is checkpointed; the problem must know its blocks."""
    ends = sorted(problem.block_ends)
    kept = kept_by_checkpointing(problem)
    recomputed = set(range(len(problem.values))) - kept
    found = _timeline(problem, kept, recomputed, lambda number: ends[bisect_left(ends, number)])
    found.forward[-1] += problem.plain_loss.forward_bytes
    found.backward[-1] += problem.plain_loss.backward_bytes
    return found


def kept_by_checkpointing(problem: Problem) -> frozenset[int]:
    """Return the numbers of the values that checkpointing would keep, inside blocks or outside.

    These are the block ends and the values saved behind all blocks. Added to these are values that
    another block saves or reads than the one that made them, and saved inputs that exist before the
    step makes anything. A block of two streams, for images and text, hands over both.
    """
    ends = sorted(problem.block_ends)
    leading = takewhile(lambda value: value.is_given, problem.values)
    given = (value.number for value in leading if value.is_saved and not value.is_made_inside)
    found = problem.block_ends.union(given)
    for value in problem.saved:
        first, last = problem.used_between.get(value.number, (value.number, value.number))
        made = last if value.is_given else value.number
        blocks = {bisect_left(ends, moment) for moment in (first, last, made)}
        if len(blocks) > 1 or len(ends) in blocks:
            found |= {value.number}
    return found.union(_handed_over(problem, ends))


def _handed_over(problem: Problem, ends: Sequence[int]) -> Iterator[int]:
    """Yield the values that an operation reads in another block than the one that made them.

    Casts that autocast caches are no block's input. Nothing is kept for what has no gradient.
    """
    for value in problem.values:
        for source in () if value.is_made_inside else value.inputs:
            if source < 0 or problem.values[source].is_given or problem.values[source].is_cached:
                continue
            if bisect_left(ends, source) != bisect_left(ends, value.number):
                yield source


def _timeline(
    problem: Problem, kept: Set[int], recomputed: Set[int], begin: Callable[[int], int]
) -> Timeline:
    """Return the timeline; a saved value is recomputed no later than `begin` returns."""
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
        if number not in kept and not values[number].is_cached:
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
    """Return the first and last moment at which each value is needed."""
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
    """Return the peak bytes while a chain is restored in order, and the values freed after it.

    Those are the values that only recomputations of this moment need.
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
    """Return the bytes of values' gradients at each moment.

    If it is not known from what an operation made a value, it made it from as many bytes.
    """
    made = (value for value in problem.values if not (value.is_given or value.is_made_inside))
    readers = {value.number: value.number for value in made}
    changes = [0] * (len(problem.values) + 2)
    for value in problem.values:
        for source in value.inputs:
            if source in readers:
                readers[source] = max(readers[source], value.number)
        if not (value.is_given or value.operation):
            changes[value.number] += value.nbytes
            changes[value.number + 1] -= value.nbytes
    for number, reader in readers.items():
        changes[number] += problem.values[number].nbytes
        changes[reader + 1] -= problem.values[number].nbytes
    return list(accumulate(changes))[:-1]
