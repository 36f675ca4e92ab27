"""Chooses what a pair of graphs keeps, offloads and computes again, and when each fetch begins.

The forward graph hands values to the backward graph. What is kept is on the device from the end of
the forward graph to its last use; what is offloaded from its fetch on; what is computed again from
its first use on. The **peak** is the most bytes that lie there so at any moment.

Values that may be kept have one order, and a budget decides how many of its first ones are: the
kept sets are nested, so the peak grows with the budget, and it never exceeds it. A fetch begins as
early as its transfer needs, but never so early that it would raise the peak with nothing kept.

Everything here is pure: no graph, device or clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storm_client.plan.decisions import OFFLOAD, REPLAY, Decision, Keep
from storm_client.plan.planner import Costs

__all__ = ["Recipe", "Saved", "Schedule", "schedule"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a saved value is computed again in the backward graph."""

    seconds: float
    sources: tuple[int, ...] = ()
    """The saved values, by number, that it is computed from. Each was made before it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that the forward graph hands to the backward graph, in the order of being made."""

    nbytes: int
    first_use: int
    """The position in the backward graph of the node that uses it first."""
    last_use: int
    can_leave: bool = True
    recipe: Recipe | None = None


class _Interval(NamedTuple):
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What becomes of the values of one pair of graphs, for every budget."""

    given_up: tuple[Decision, ...]
    """What becomes of each value that is not kept: OFFLOAD, REPLAY, or Keep where it cannot go."""
    first_uses: tuple[int, ...]
    """Where each value has to be there: earlier than its own use where others are made from it."""
    fetches: tuple[int, ...]
    """The position before which the fetch of each value begins."""
    order: tuple[int, ...]
    """The values that may be kept by choice, those first that are kept first."""
    peaks: tuple[int, ...]
    """Bytes at the most, by how many of `order` are kept; never less for more."""
    kept_bytes: tuple[int, ...]
    """What the first so many of `order` come to."""

    @property
    def least(self) -> int:
        """The least possible peak, in bytes."""
        return self.peaks[0]

    def fitting(self, nbytes: int) -> int:
        """Return how many of `order` can be kept for a peak of at most `nbytes`."""
        return max(0, int(np.searchsorted(self.peaks, nbytes, side="right")) - 1)

    def holding(self, nbytes: int) -> int:
        """Return how many of `order` come to at most `nbytes`."""
        return max(0, int(np.searchsorted(self.kept_bytes, nbytes, side="right")) - 1)

    def decisions(self, count: int) -> list[Decision]:
        """Return what becomes of each value if the first `count` of `order` are kept."""
        decided = list(self.given_up)
        for number in self.order[:count]:
            decided[number] = Keep("budget")
        return decided


def schedule(values: Sequence[Saved], seconds: Sequence[float], costs: Costs) -> Schedule:
    """Return the schedule of values that are used in a backward graph.

    `seconds` is how long the node at each position of that graph takes. Computing again is chosen
    where it is cheaper than shipping, unless it would raise the least possible peak.
    """
    without = _schedule(values, seconds, costs, frozenset())
    cheap = frozenset(
        number
        for number, value in enumerate(values)
        if value.can_leave and value.recipe is not None and _is_cheap(value, value.recipe, costs)
    )
    if not cheap:
        return without
    computed = _schedule(values, seconds, costs, cheap)
    return computed if computed.least <= without.least else without


def _is_cheap(value: Saved, recipe: Recipe, costs: Costs) -> bool:
    again = max(recipe.seconds, costs.replay_floor)
    return again < value.nbytes * costs.shipping + costs.ship_floor


def _schedule(
    values: Sequence[Saved], seconds: Sequence[float], costs: Costs, again: frozenset[int]
) -> Schedule:
    needed = _needed(values, again)
    given_up = tuple(_given_up(number, value, again) for number, value in enumerate(values))
    live = np.zeros(len(seconds) + 1, dtype=np.int64)
    for value, interval, decision in zip(values, needed, given_up, strict=True):
        begin = 0 if isinstance(decision, Keep) else interval.first
        live[begin : interval.last + 1] += value.nbytes
    transfers = {
        number: values[number].nbytes * costs.link
        for number, decision in enumerate(given_up)
        if decision == OFFLOAD
    }
    fetches = _fetches(values, needed, transfers, seconds, live)
    order = _order(values, needed, again, costs)
    peaks = [int(live.max(initial=0))]
    for number in order:
        begin = needed[number].first if number in again else fetches[number]
        live[:begin] += values[number].nbytes
        peaks.append(int(live.max(initial=0)))
    return Schedule(
        given_up=given_up,
        first_uses=tuple(one.first for one in needed),
        fetches=tuple(fetches),
        order=tuple(order),
        peaks=tuple(peaks),
        kept_bytes=tuple(accumulate((values[n].nbytes for n in order), initial=0)),
    )


def _given_up(number: int, value: Saved, again: frozenset[int]) -> Decision:
    if not value.can_leave:
        return Keep("cannot leave")
    return REPLAY if number in again else OFFLOAD


def _needed(values: Sequence[Saved], again: frozenset[int]) -> list[_Interval]:
    """Return when each value has to be there, for its own uses and for what is made from it."""
    needed = [_Interval(value.first_use, value.last_use) for value in values]
    for number in reversed(range(len(values))):
        recipe = values[number].recipe
        if number not in again or recipe is None:
            continue
        use = needed[number].first
        for source in recipe.sources:
            first, last = needed[source]
            needed[source] = _Interval(min(first, use), max(last, use))
    return needed


def _order(
    values: Sequence[Saved], needed: Sequence[_Interval], again: frozenset[int], costs: Costs
) -> list[int]:
    """Return what may be kept: what saves most time for its bytes, then what is used soonest."""

    def gain(number: int) -> float:
        value = values[number]
        if number in again and value.recipe is not None:
            return max(value.recipe.seconds, costs.replay_floor) / value.nbytes
        return costs.shipping + costs.ship_floor / value.nbytes

    candidates = [n for n, value in enumerate(values) if value.can_leave and value.nbytes]
    return sorted(candidates, key=lambda n: (-gain(n), needed[n].first, n))


def _fetches(
    values: Sequence[Saved],
    needed: Sequence[_Interval],
    transfers: Mapping[int, float],
    seconds: Sequence[float],
    live: npt.NDArray[np.int64],
) -> list[int]:
    """Return where each fetch begins, and add to `live` what that takes: the peak stays.

    `transfers` has the values that are fetched, with the seconds that each takes on the link.

    The link carries one value at a time, in the order of use. Going back from the last, each
    transfer has to end before its use and before the next begins; then, going forward, each is put
    off until there is memory for it.
    """
    positions = [one.first for one in needed]
    by_use = sorted(transfers, key=lambda n: (needed[n].first, n))
    begins = list(accumulate(seconds, initial=0.0))
    free = begins[-1]
    for number in reversed(by_use):
        free = min(free, begins[needed[number].first]) - transfers[number]
        positions[number] = max(0, int(np.searchsorted(begins, free, side="right")) - 1)
    peak = int(live.max(initial=0))
    for number in by_use:
        use, nbytes = needed[number].first, values[number].nbytes
        full = np.flatnonzero(live[positions[number] : use] + nbytes > peak)
        if full.size:
            positions[number] += int(full[-1]) + 1
        live[positions[number] : use] += nbytes
    return positions
