"""What decisions cost the thread that trains, and what is chosen where the step is CPU-bound.

Each saved tensor that stays, leaves or is recomputed takes that thread some time, whatever its
size. As long as the device has work queued that time is hidden. A step of small operations has
none queued: its device waits for the thread, and each decision makes the step longer.

In such a step nothing is gained by making values again. That takes the thread as long as handing
them over, and besides each function has to be watched. So values leave, the largest first, as
those free most for the time: until what stays fits the budget, or, with the budget "least", until
that takes as long as checkpointing would.

How long an event takes is known from one machine. By how much another is slower is seen in the
forward passes that are timed. Everything here is pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

from storm_client.planner.decisions import LAST, OFFLOAD, Decision, Keep, Replay
from storm_client.planner.problem import Value
from storm_client.planner.solver import Choice

__all__ = [
    "HostBound",
    "HostPass",
    "Load",
    "choose_for_host",
    "host_bound",
    "load_of",
    "spare_seconds",
    "thread_slower",
]

CHECKPOINTING: Final = 1.5
"""Forward passes that checkpointing takes the thread: the one that is run again, and its own work
in both. That was 1.95 where it was measured; the rest is for what is not counted here."""

BOUND_SHARE: Final = 0.6
"""Of the forward pass by the device's clock: a thread that was busy for less had time to spare."""

MOST_SLOWER: Final = 32.0
"""By how much a machine is taken to be slower or faster than that of the constants at the most."""

LEAST_OWN: Final = 0.1
"""Of the thread's time the least that is taken to be the script's: what is counted as ours is
measured around single events, and may be too much."""


class HostPass(NamedTuple):
    """What a forward pass took the thread that trains, in seconds of its processor."""

    seconds: float
    ours: float
    """Of them, in what is done for the offload of single values."""


@dataclass(frozen=True, slots=True)
class HostBound:
    """What is known of a step for which the device waits for the thread that trains."""

    forward_seconds: float
    """Of the thread, for the forward pass without offload."""
    slower: float = 1.0
    """How many times as long an event takes here as on the machine of this module's constants."""


class Load(NamedTuple):
    """What is done for values costs the thread, in seconds of each pass."""

    forward: float
    backward: float


KEPT: Final = Load(7e-6, 2e-6)
STORED: Final = Load(1.56e-4, 7.3e-5)
AGAIN: Final = Load(2e-5, 3e-5)
"""A save of what has been handed over before."""

MADE: Final = Load(3e-5, 2.16e-4)
WATCHED: Final = 1.8e-5
"""Seconds for a function of the table."""


def spare_seconds(host: HostBound) -> float:
    """Return what the budget "least" may take the thread: not more than checkpointing."""
    return CHECKPOINTING * host.forward_seconds


def load_of(values: Sequence[Value], decisions: Sequence[Decision], functions: int) -> Load:
    """Return what decisions cost the thread of the machine on which that was measured.

    A step runs `functions` of the table, which are watched where anything is recomputed.
    """
    forward = backward = 0.0
    makes = False
    for value, decision in zip(values, decisions, strict=True):
        if isinstance(decision, Replay):
            makes = True
            first, later = MADE, AGAIN
        elif isinstance(decision, Keep):
            first = later = KEPT
        else:
            first, later = STORED, AGAIN
        if value.is_saved or isinstance(decision, Replay):
            again = max(value.uses - 1, 0)
            forward += first.forward + again * later.forward
            backward += first.backward + again * later.backward
    return Load(forward + functions * WATCHED * makes, backward)


def host_bound(
    passes: Sequence[HostPass], forward_seconds: float, expected: float
) -> HostBound | None:
    """Return what is known of a step whose device waits for the thread, None if that has time.

    `passes` are the thread's forward passes, which took `forward_seconds` by the device's clock,
    and in which decisions were `expected` to take so many.
    """
    if not passes:
        return None
    shortest = min(passes)
    if shortest.seconds < BOUND_SHARE * forward_seconds:
        return None
    own = max(shortest.seconds - shortest.ours, LEAST_OWN * shortest.seconds)
    return HostBound(own, thread_slower(passes, expected) or 1.0)


def thread_slower(passes: Sequence[HostPass], expected: float) -> float | None:
    """Return how many times as long as on the constants' machine things take this thread.

    None where that was not seen. `expected` is what they should have taken in one of the passes.
    """
    if not passes or expected <= 0.0:
        return None
    slower = min(one.ours for one in passes) / expected
    return min(max(slower, 1 / MOST_SLOWER), MOST_SLOWER)


def choose_for_host(
    choice: Choice,
    values: Sequence[Value],
    host: HostBound,
    *,
    link: float,
    functions: int = 0,
    room: int | None = None,
    spare: float | None = None,
) -> Choice:
    """Return what becomes of each value of a step that is CPU-bound.

    That is `choice`, which minds the device alone, if it takes no longer than what would be chosen
    here; without `room`, if it takes no longer than checkpointing. Of the values that leave by that
    choice or are recomputed, the largest leave here: until `room` bytes stay, or as long as that
    takes no longer than checkpointing.

    A byte takes the `link` so many seconds one way, and a step runs `functions` of the table.
    `spare` seconds are what checkpointing would take, of which some may be spent already.
    """
    if spare is None:
        spare = spare_seconds(host)

    def seconds(one: Choice) -> float:
        load = load_of(values, one.decisions, functions)
        forward = host.slower * load.forward
        behind = max(0.0, one.link_seconds - host.forward_seconds - forward)
        return forward + host.slower * load.backward + 2 * behind

    def with_leaving(count: int) -> Choice:
        return _with_leaving(choice, values, set(largest[:count]), link, is_least=room is None)

    choice = choice._replace(host_seconds=seconds(choice))
    if room is None and choice.host_seconds <= spare:
        return choice
    largest = sorted(_may_leave(choice, values), key=lambda n: (-values[n].nbytes, n))
    counts = range(len(largest) + 1)
    if room is None:
        count = bisect_right(counts, spare, key=lambda n: seconds(with_leaving(n)))
        count = max(count - 1, 0)
    else:
        count = bisect_left(counts, -room, key=lambda n: -with_leaving(n).kept_bytes)
    chosen = with_leaving(min(count, len(largest)))
    chosen = chosen._replace(host_seconds=seconds(chosen))
    is_better = room is None or chosen.host_seconds < choice.host_seconds
    return chosen if is_better else choice


def _may_leave(choice: Choice, values: Sequence[Value]) -> list[int]:
    """Return the saved values but those that are asked for too soon in any case."""
    return [
        value.number
        for value, decision in zip(values, choice.decisions, strict=True)
        if value.is_saved and decision != LAST
    ]


def _with_leaving(
    choice: Choice, values: Sequence[Value], leaving: Set[int], link: float, *, is_least: bool
) -> Choice:
    """Return a choice by which some values leave and all others that are saved stay."""
    stays, why = _LEAST if is_least else _BUDGET
    decided: list[tuple[Decision, str, float]] = []
    kept = gone = 0
    for value, decision, reason in zip(values, choice.decisions, choice.reasons, strict=True):
        if not value.is_saved:
            decided.append((OFFLOAD, "not saved", 0.0))
        elif value.number in leaving:
            gone += value.nbytes
            decided.append((OFFLOAD, "the processor has time for it", value.nbytes * link))
        elif decision == LAST:
            decided.append((LAST, reason, 0.0))
        else:
            kept += value.nbytes
            decided.append((stays, why, 0.0))
    return choice._replace(
        decisions=[decision for decision, _, _ in decided],
        reasons=[reason for _, reason, _ in decided],
        costs=[cost for _, _, cost in decided],
        kept_bytes=kept,
        link_seconds=gone * link,
        replay_seconds=0.0,
    )


_LEAST: Final = Keep("host"), "the processor has no time to give it up"
_BUDGET: Final = Keep("budget"), "the budget has room"
