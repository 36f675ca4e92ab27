"""Divides the plan of a step on several GPUs: each GPU has memory and a link of its own.

What is kept on one GPU takes no room from another, and both links transfer at once. So each GPU is
a problem of its own. A value that was copied from another GPU is not recomputed, so no problem
depends on another. Values on the host belong to the first GPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from storm_client.planner.decisions import OFFLOAD, Decision
from storm_client.planner.machine import CUDA
from storm_client.planner.prices import operation_seconds
from storm_client.planner.problem import NO_LOSS, Problem, Value
from storm_client.planner.solver import Choice

__all__ = ["Part", "merged", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """The values of a step on one GPU, as a problem of their own."""

    problem: Problem
    numbers: Sequence[int]
    """The numbers of its values in the whole step."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saves on this GPU."""
        return sum(value.nbytes for value in self.problem.saved)

    def choice_of(self, choice: Choice) -> Choice:
        """Return the part of a choice for the whole step."""
        return choice.of(self.numbers)


def parts_of(problem: Problem) -> list[Part]:
    """Return a problem for each GPU of a step; on one GPU, or on none, the problem itself."""
    devices = list(dict.fromkeys(one.device for one in problem.values if one.device is not None))
    if len(devices) < 2:
        return [Part(problem, range(len(problem.values)))]
    seconds = operation_seconds(problem.values, CUDA)
    return [
        _part(
            problem,
            [one.number for one in problem.values if _place(one, devices[0]) == device],
            seconds,
        )
        for device in devices
    ]


def _place(value: Value, first: int) -> int:
    return first if value.device is None else value.device


def _part(problem: Problem, numbers: list[int], seconds: Sequence[float]) -> Part:
    """Return the problem of the values with these numbers.

    Its link has the time in which its own operations run in the forward pass. Only the GPU that
    saves the last value has the loss, and tensors that are needed at once. The model's result may
    be copied to another GPU after that.
    """
    places = {number: place for place, number in enumerate(numbers)}
    is_last = max((one.number for one in problem.saved), default=-1) in places
    share = _sum(seconds[n] for n in numbers) / (_sum(seconds) or 1.0)
    window = problem.forward_seconds
    part = replace(
        problem,
        values=tuple(_renumbered(problem.values[number], places) for number in numbers),
        rejected={places[n]: why for n, why in problem.rejected.items() if n in places},
        forward_seconds=None if window is None else share * window,
        turn_seconds=problem.turn_seconds if is_last else math.inf,
        last_bytes=problem.last_bytes if is_last else 0,
        used_between={
            places[n]: (bisect_left(numbers, first), bisect_left(numbers, last))
            for n, (first, last) in problem.used_between.items()
            if n in places
        },
        block_ends=frozenset(places[n] for n in problem.block_ends if n in places),
        plain_loss=problem.plain_loss if is_last else NO_LOSS,
    )
    return Part(part, numbers)


def _sum(seconds: Iterable[float]) -> float:
    return sum(filter(math.isfinite, seconds))


def _renumbered(value: Value, places: dict[int, int]) -> Value:
    inputs = tuple(places.get(one, -1) for one in value.inputs)
    is_copied = any(one >= 0 and one not in places for one in value.inputs)
    return replace(
        value,
        number=places[value.number],
        inputs=inputs,
        operation="" if is_copied else value.operation,
        is_given=is_copied or value.is_given,
    )


def merged(problem: Problem, parts: Sequence[Part], choices: Sequence[Choice]) -> Choice:
    """Return the choice for the whole step. Its links transfer at once, its operations in turn."""
    if len(parts) == 1:
        return choices[0]
    count = len(problem.values)
    decisions: list[Decision] = [OFFLOAD] * count
    reasons, costs = [""] * count, [0.0] * count
    for part, choice in zip(parts, choices, strict=True):
        for place, number in enumerate(part.numbers):
            decisions[number] = choice.decisions[place]
            reasons[number] = choice.reasons[place]
            costs[number] = choice.costs[place]
    return Choice(
        decisions,
        reasons,
        costs,
        kept_bytes=sum(one.kept_bytes for one in choices),
        link_seconds=max(one.link_seconds for one in choices),
        replay_seconds=sum(one.replay_seconds for one in choices),
        forward_seconds=sum(one.forward_seconds for one in choices),
        seconds=sum(one.seconds for one in choices),
    )
