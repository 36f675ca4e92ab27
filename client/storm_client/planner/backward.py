"""How much of what a step saves lies on the device at each moment of its backward pass.

A backward pass goes through a step's operations in reverse. Its moments have the numbers of the
values that these made; that of the loss, with which it begins, is one more than the last. At each
lie there:

- what is kept, from the begin to its last use;
- what was offloaded or is recomputed, from its first use to its last, and what that is made from;
- the gradients of values, from the first that depends on one to the operation that made it.

Checkpointing keeps what its blocks end with and what no block makes, and recomputes all that a
block saves where its backward pass begins.

What is in flight is not counted, nor are the gradients of parameters: those are the same whatever
becomes of saved tensors. So the bytes of two plans compare at each moment, and their peaks where
the parameters' gradients are small beside them.

Everything here is pure: no tensor, device or clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Set
from itertools import accumulate

from storm_client.planner.decisions import Decision, Keep, Replay
from storm_client.planner.problem import Problem

__all__ = ["checkpointed_bytes", "kept_by_checkpointing", "planned_bytes"]


def planned_bytes(problem: Problem, decisions: Iterable[Decision]) -> list[int]:
    """Return the bytes at each moment, by number, if these decisions are followed."""
    kept, recomputed = set(), set()
    for number, decision in enumerate(decisions):
        if isinstance(decision, Keep):
            kept.add(number)
        elif isinstance(decision, Replay):
            recomputed.add(number)
    return _bytes(problem, kept, recomputed, lambda number: number)


def checkpointed_bytes(problem: Problem) -> list[int]:
    """Return the same if each block is checkpointed; the problem knows its blocks."""
    ends = sorted(problem.block_ends)
    kept = kept_by_checkpointing(problem)
    recomputed = {value.number for value in problem.values if value.operation} - kept
    return _bytes(problem, kept, recomputed, lambda number: ends[bisect_left(ends, number)])


def kept_by_checkpointing(problem: Problem) -> frozenset[int]:
    """Return the numbers of what checkpointing each block would keep, inside of blocks or not."""
    last = max(problem.block_ends, default=-1)
    outside = {value.number for value in problem.saved if value.number > last}
    given = {value.number for value in problem.saved if not value.operation}
    return problem.block_ends | outside | given


def _bytes(
    problem: Problem, kept: Set[int], recomputed: Set[int], begin: Callable[[int], int]
) -> list[int]:
    """Return the bytes at each moment; a saved value is recomputed no later than `begin` says."""
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
        chain = sorted(arriving.get(moment, ()))
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
    passing &= set(chain) - problem.used_between.keys()
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
