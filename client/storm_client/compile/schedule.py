"""Chooses what a pair of graphs keeps, offloads and recomputes.

`estimates.py` says what a choice costs. With nothing kept:

1. What costs less to recompute than to transfer is recomputed, though the link had time.
2. While the link needs longer than the forward graph, what relieves it most for its time is
   recomputed too, if that takes less time than the link would.

Then values are kept, one after the other, what saves most time for what it adds to the peak first.
What is kept leaves the link time, in which what is most expensive to recompute is offloaded after
all. A budget decides how many are kept: the kept sets are nested, so the peak grows with the
budget, and it never exceeds it.

Everything here is pure: no graph, device or clock.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from storm_client.compile.estimates import Draft, Problem, Saved
from storm_client.planner.machine import Machine

__all__ = ["Schedule", "schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What becomes of the values of one pair of graphs, for every budget."""

    order: tuple[int, ...]
    """The values that may be kept by choice, those first that are kept first."""
    peaks: tuple[int, ...]
    """Bytes at the most, by how many of `order` are kept; never less for more."""
    kept_bytes: tuple[int, ...]
    """What the first so many of `order` come to."""
    again_until: tuple[int, ...]
    """Each value is recomputed while fewer than so many of `order` are kept."""
    problem: Problem

    @property
    def least(self) -> int:
        """The peak with nothing kept by choice, in bytes."""
        return self.peaks[0]

    def fitting(self, nbytes: int) -> int:
        """Return how many of `order` can be kept for a peak of at most `nbytes`."""
        return max(0, int(np.searchsorted(self.peaks, nbytes, side="right")) - 1)

    def holding(self, nbytes: int) -> int:
        """Return how many of `order` come to at most `nbytes`."""
        return max(0, int(np.searchsorted(self.kept_bytes, nbytes, side="right")) - 1)

    def draft(self, count: int, *, in_runs: bool = False) -> Draft:
        """Return what becomes of each value if the first `count` of `order` are kept.

        Where a run decides what is kept, `in_runs`, they are offloaded by decision: as many as let
        the peak be what it is with nothing kept.
        """
        if in_runs:
            again = self._again_in_runs(count)
            return self.problem.draft(frozenset(), again, self.least)
        return self.problem.draft(
            frozenset(self.order[:count]), self._again(count), self.peaks[count]
        )

    def _again(self, count: int) -> frozenset[int]:
        """Return what is recomputed while the first `count` of `order` are kept."""
        return frozenset(n for n, until in enumerate(self.again_until) if count < until)

    def _again_in_runs(self, count: int) -> frozenset[int]:
        """Return the same for as many that the peak with nothing kept is not exceeded.

        Less that is recomputed may need more at once: where others are made from it, it has to
        be there earlier than for its own use, and what it is made from may go then.
        """
        while self.problem.peak(frozenset(), self._again(count)) > self.least:
            count -= 1
        return self._again(count)


def schedule(
    values: Sequence[Saved],
    seconds: Sequence[float],
    machine: Machine,
    forward_seconds: float | None = None,
) -> Schedule:
    """Return the schedule of values that are used in a backward graph.

    `seconds` is for how long the link can carry beside the node at each position of that graph,
    `forward_seconds` for how long beside the forward graph; None where transfers hide behind
    nothing, and cost the processor that computes what `machine` says.
    """
    problem = Problem(tuple(values), tuple(seconds), machine, forward_seconds)
    state = _State(problem)
    state.compute_cheap()
    state.relieve_link()
    state.ship_what_fits()
    return _kept_in_order(state)


@dataclass
class _State:
    """What was decided so far; nothing that is in neither set stays or is recomputed."""

    problem: Problem
    kept: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    _peak: int = -1

    def compute_cheap(self) -> None:
        """Recompute what costs less than a transfer, where the link has time."""
        self._take_best(lambda _late, _relieved, seconds: max(0.0, -seconds))

    def relieve_link(self) -> None:
        """Compute dearer values again while the link needs longer than the graphs compute."""

        def worth(late: float, relieved: float, seconds: float) -> float:
            if late <= 0.0 or relieved <= seconds:
                return 0.0
            return relieved / max(seconds, 1e-12)

        self._take_best(worth)

    def _take_best(self, worth: Callable[[float, float, float], float]) -> None:
        """Recompute what is worth most, as long as something is worth anything.

        `worth` is called with the seconds by which the link is late, by which it would be less,
        and with those that computing takes more than shipping does. Worths seldom change, so each
        is looked at again only when it is the best.
        """
        groups = ((-worth(*self._relief(group)), group) for group in self._groups())
        waiting = [one for one in groups if one[0] < 0.0]
        heapq.heapify(waiting)
        while waiting:
            _, group = heapq.heappop(waiting)
            if self.again.issuperset(group):
                continue
            now = -worth(*self._relief(group))
            if now >= 0.0:
                continue
            if waiting and now > waiting[0][0]:
                heapq.heappush(waiting, (now, group))
            elif self._is_smaller(group):
                self.again.update(group)

    def _groups(self) -> list[tuple[int, ...]]:
        """Return what may be recomputed: each value, and those together that share sources."""
        problem = self.problem
        together: dict[frozenset[int], list[int]] = {}
        found: list[tuple[int, ...]] = []
        for number, value in enumerate(problem.values):
            if value.can_leave and value.recipe is not None and not value.is_only_a_source:
                found.append((number,))
                sources = frozenset(problem.sources((number,)))
                if sources:
                    together.setdefault(sources, []).append(number)
        return found + [tuple(group) for group in together.values() if len(group) > 1]

    def _relief(self, group: tuple[int, ...]) -> tuple[float, float, float]:
        problem, kept = self.problem, frozenset(self.kept)
        again = frozenset(self.again)
        more = again.union(group)
        before, after = problem.leaves(kept, again), problem.leaves(kept, more)
        late = problem.late(before)
        seconds = sum(problem.replay_seconds(n) for n in more - again)
        seconds += float(problem.ships[after].sum() - problem.ships[before].sum())
        return late, late - problem.late(after), seconds

    def _is_smaller(self, group: tuple[int, ...]) -> bool:
        """Tell whether computing adds less to the peak than it takes from the link."""
        problem, again = self.problem, frozenset(self.again)
        more = again.union(group)
        if self._peak < 0:
            self._peak = problem.peak_in_time(again)
        peak = problem.peak_in_time(more)
        sources = problem.sources(more) - problem.sources(again)
        nbytes = sum(problem.values[n].nbytes for n in group)
        nbytes -= sum(problem.values[n].nbytes for n in sources)
        if peak - self._peak >= max(nbytes, 1):
            return False
        self._peak = peak
        return True

    def ship_what_fits(self) -> list[int]:
        """Ship what is dear to compute for what it takes of the link, while that has time."""
        problem, found = self.problem, list[int]()
        leaves = problem.leaves(frozenset(self.kept), frozenset(self.again))
        late, users = problem.late(leaves), self._users()
        for number in sorted(self.again, key=lambda n: (-self._seconds_saved(n), n)):
            freed = [n for n in problem.sources((number,)) if users[n] == 1]
            spared = problem.replay_seconds(number) + float(problem.ships[freed].sum())
            spared -= float(problem.ships[number])
            if spared <= 0.0:
                continue
            changed = leaves.copy()
            changed[number], changed[freed] = True, False
            later = problem.late(changed)
            if later - late < spared:
                self.again.discard(number)
                found.append(number)
                leaves, late, users = changed, later, self._users()
        return found

    def _users(self) -> Counter[int]:
        """Count what is recomputed from each value that nothing else uses."""
        return Counter(n for one in self.again for n in self.problem.sources((one,)))

    def _seconds_saved(self, number: int) -> float:
        """Return what is saved for a second of the link."""
        problem = self.problem
        return problem.replay_seconds(number) / max(float(problem.transfers[number]), 1e-12)

    def gains(self, numbers: Iterable[int]) -> dict[int, float]:
        """Return what keeping each of some values saves by itself, in seconds."""
        problem = self.problem
        leaves = problem.leaves(frozenset(self.kept), frozenset(self.again))
        reliefs, price = problem.reliefs(leaves), self._price()
        users = self._users()

        def shipping(number: int) -> float:
            relief = reliefs.get(number, 0.0)
            freed = max(0.0, float(problem.transfers[number]) - relief)
            return float(problem.ships[number]) + relief + price * freed

        def gain(number: int) -> float:
            if number not in self.again:
                return shipping(number)
            spared = sum(shipping(n) / users[n] for n in problem.sources((number,)))
            return problem.replay_seconds(number) + spared

        return {number: gain(number) for number in numbers}

    def _price(self) -> float:
        """Return what a second of the link is worth that is free: what it spares of computing."""
        dear = (self._seconds_saved(n) for n in self.again if self.problem.could_leave_in_time(n))
        return min(1.0, max(dear, default=0.0))


def _kept_in_order(state: _State) -> Schedule:
    """Keep one value after the other, what saves most for what it adds to the peak first."""
    problem = state.problem
    least = problem.limit(frozenset(state.again))
    until = [0] * len(problem.values)
    for number in state.again:
        until[number] = len(until) + 1
    order: list[int] = []
    peaks = [least]
    left = {
        n
        for n, value in enumerate(problem.values)
        if value.can_leave and value.nbytes and not value.is_only_a_source
    }
    while left:
        number = _next(state, left)
        left.discard(number)
        order.append(number)
        state.kept.add(number)
        gone = [number] if number in state.again else []
        state.again.discard(number)
        for one in (*gone, *state.ship_what_fits()):
            until[one] = len(order)
        peak = problem.peak(frozenset(state.kept), frozenset(state.again))
        peaks.append(max(peaks[-1], peak))
    return Schedule(
        tuple(order),
        tuple(peaks),
        tuple(accumulate((problem.values[n].nbytes for n in order), initial=0)),
        tuple(until),
        problem,
    )


def _next(state: _State, left: set[int]) -> int:
    problem = state.problem
    kept, again = frozenset(state.kept), frozenset(state.again)
    needed = problem.needed(kept, again)
    live = problem.live(kept, again)
    before, after = np.maximum.accumulate(live), np.maximum.accumulate(live[::-1])[::-1]
    peak, gains = int(before[-1]), state.gains(left)

    def rank(number: int) -> tuple[float, int, int]:
        nbytes, first = problem.values[number].nbytes, needed[number].first
        new = max(int(after[first]), int(before[first - 1]) + nbytes if first else 0)
        # What adds nothing to the peak is the best that there is, what saves most first.
        return -gains[number] / max(new - peak, 1), first, number

    return min(left, key=rank)
