"""Chooses what a pair of graphs keeps, offloads and recomputes.

`estimates.py` computes the cost of a choice. With nothing kept:

1. Values that cost less to recompute than to transfer are recomputed, even if the link has time.
2. While the link needs longer than the graphs compute, more values are recomputed, if that takes
   less time than the link would. Those that relieve the link most for their time come first.

Then values are kept, one after the other. The value that saves most time for the bytes that it adds
to the peak comes first. A kept value frees time of the link, in which the values that are most
expensive to recompute are offloaded after all. A budget decides how many values are kept. The kept
sets are nested, so the peak grows with the budget, and it never exceeds the budget.

All code here is pure: it uses no graph, device or clock.
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
    """The decisions for the values of one pair of graphs, for every budget."""

    order: tuple[int, ...]
    """The values that may be kept by choice, in the order in which they are kept."""
    peaks: tuple[int, ...]
    """The peak in bytes, by how many of `order` are kept; it never decreases."""
    kept_bytes: tuple[int, ...]
    """The total bytes of the first n of `order`, by n."""
    recomputed_until: tuple[int, ...]
    """Value n is recomputed while fewer than `recomputed_until[n]` of `order` are kept."""
    problem: Problem

    @property
    def least(self) -> int:
        """The peak with nothing kept by choice, in bytes."""
        return self.peaks[0]

    def fitting(self, nbytes: int) -> int:
        """Return how many of `order` can be kept for a peak of at most `nbytes`."""
        return max(0, int(np.searchsorted(self.peaks, nbytes, side="right")) - 1)

    def holding(self, nbytes: int) -> int:
        """Return how many of `order`, from the first on, take at most `nbytes` together."""
        return max(0, int(np.searchsorted(self.kept_bytes, nbytes, side="right")) - 1)

    def draft(self, count: int, *, in_runs: bool = False) -> Draft:
        """Return the decision for each value if the first `count` of `order` are kept.

        With `in_runs`, each run decides what is kept, so the plan offloads these values. It
        recomputes as if up to `count` values were kept: as many as do not exceed the peak with
        nothing kept.
        """
        if in_runs:
            recomputed = self._recomputed_in_runs(count)
            return self.problem.draft(frozenset(), recomputed, self.least)
        return self.problem.draft(
            frozenset(self.order[:count]), self._recomputed(count), self.peaks[count]
        )

    def _recomputed(self, count: int) -> frozenset[int]:
        """Return the values that are recomputed while the first `count` of `order` are kept."""
        return frozenset(n for n, until in enumerate(self.recomputed_until) if count < until)

    def _recomputed_in_runs(self, count: int) -> frozenset[int]:
        """Return the same, lowering `count` until the peak with nothing kept is at most `least`.

        Recomputing fewer values may need more bytes at once. A value from which others are
        recomputed must be present before its own use, and its own sources may be freed then.
        """
        while self.problem.peak(frozenset(), self._recomputed(count)) > self.least:
            count -= 1
        return self._recomputed(count)


def schedule(
    values: Sequence[Saved],
    seconds: Sequence[float],
    machine: Machine,
    forward_seconds: float | None = None,
) -> Schedule:
    """Return the schedule for the saved values of a backward graph.

    `seconds` says for how long the link can transfer beside the node at each position of that
    graph, `forward_seconds` for how long beside the forward graph. None means that nothing hides
    transfers, and that they cost the computing processor the time that `machine` says.
    """
    problem = Problem(tuple(values), tuple(seconds), machine, forward_seconds)
    state = _State(problem)
    state.recompute_cheap()
    state.relieve_link()
    state.offload_while_idle()
    return _kept_in_order(state)


@dataclass
class _State:
    """The decisions so far; a value in neither set is neither kept nor recomputed."""

    problem: Problem
    kept: set[int] = field(default_factory=set)
    recomputed: set[int] = field(default_factory=set)
    _peak: int = -1

    def recompute_cheap(self) -> None:
        """Recompute values that cost less than their transfer, even if the link has time."""
        self._take_best(lambda _late, _relieved, seconds: max(0.0, -seconds))

    def relieve_link(self) -> None:
        """Recompute more expensive values while the link needs longer than the graphs compute."""

        def worth(late: float, relieved: float, seconds: float) -> float:
            if late <= 0.0 or relieved <= seconds:
                return 0.0
            return relieved / max(seconds, 1e-12)

        self._take_best(worth)

    def _take_best(self, worth: Callable[[float, float, float], float]) -> None:
        """Recompute the values that are worth most, as long as any worth is positive.

        `worth` is called with the seconds by which the link is late, the seconds by which that
        would shrink, and the seconds that recomputing takes longer than offloading. Worths seldom
        change, so each is computed again only when it is the best.
        """
        groups = ((-worth(*self._relief(group)), group) for group in self._groups())
        waiting = [one for one in groups if one[0] < 0.0]
        heapq.heapify(waiting)
        while waiting:
            _, group = heapq.heappop(waiting)
            if self.recomputed.issuperset(group):
                continue
            now = -worth(*self._relief(group))
            if now >= 0.0:
                continue
            if waiting and now > waiting[0][0]:
                heapq.heappush(waiting, (now, group))
            elif self._is_smaller(group):
                self.recomputed.update(group)

    def _groups(self) -> list[tuple[int, ...]]:
        """Return the groups that may be recomputed: each value, and values that share sources."""
        problem = self.problem
        together: dict[frozenset[int], list[int]] = {}
        found: list[tuple[int, ...]] = []
        for number, value in enumerate(problem.values):
            if value.is_offloadable and value.recipe is not None and not value.is_only_a_source:
                found.append((number,))
                sources = frozenset(problem.sources((number,)))
                if sources:
                    together.setdefault(sources, []).append(number)
        return found + [tuple(group) for group in together.values() if len(group) > 1]

    def _relief(self, group: tuple[int, ...]) -> tuple[float, float, float]:
        problem, kept, recomputed = self.problem, self.kept, self.recomputed
        more = recomputed.union(group)
        before, after = problem.is_offloaded(kept, recomputed), problem.is_offloaded(kept, more)
        late = problem.late(before)
        seconds = sum(problem.replay_seconds(n) for n in more - recomputed)
        seconds += float(
            problem.offload_seconds[after].sum() - problem.offload_seconds[before].sum()
        )
        return late, late - problem.late(after), seconds

    def _is_smaller(self, group: tuple[int, ...]) -> bool:
        """Return whether recomputing adds fewer bytes to the peak than it takes from the link."""
        problem, recomputed = self.problem, self.recomputed
        more = recomputed.union(group)
        if self._peak < 0:
            self._peak = problem.peak_in_time(recomputed)
        peak = problem.peak_in_time(more)
        sources = problem.sources(more) - problem.sources(recomputed)
        nbytes = sum(problem.values[n].nbytes for n in group)
        nbytes -= sum(problem.values[n].nbytes for n in sources)
        if peak - self._peak >= max(nbytes, 1):
            return False
        self._peak = peak
        return True

    def offload_while_idle(self) -> list[int]:
        """Offload recomputed values after all while the link has time, and return them.

        Those that are most expensive to recompute for their time of the link come first.
        """
        problem, found = self.problem, list[int]()
        offloaded = problem.is_offloaded(self.kept, self.recomputed)
        late, users = problem.late(offloaded), self._users()
        for number in sorted(self.recomputed, key=lambda n: (-self._seconds_saved(n), n)):
            freed = [n for n in problem.sources((number,)) if users[n] == 1]
            spared = problem.replay_seconds(number) + float(problem.offload_seconds[freed].sum())
            spared -= float(problem.offload_seconds[number])
            if spared <= 0.0:
                continue
            changed = offloaded.copy()
            changed[number], changed[freed] = True, False
            later = problem.late(changed)
            if later - late < spared:
                self.recomputed.discard(number)
                found.append(number)
                offloaded, late, users = changed, later, self._users()
        return found

    def _users(self) -> Counter[int]:
        """Count the recomputed values of each source that nothing else uses."""
        return Counter(n for one in self.recomputed for n in self.problem.sources((one,)))

    def _seconds_saved(self, number: int) -> float:
        """Return the seconds of recomputing that a second of the link saves."""
        problem = self.problem
        return problem.replay_seconds(number) / max(float(problem.transfers[number]), 1e-12)

    def gains(self, numbers: Iterable[int]) -> dict[int, float]:
        """Return how many seconds keeping each of some values saves by itself."""
        problem = self.problem
        offloaded = problem.is_offloaded(self.kept, self.recomputed)
        reliefs, price = problem.reliefs(offloaded), self._price()
        users = self._users()

        def offloading(number: int) -> float:
            relief = reliefs.get(number, 0.0)
            freed = max(0.0, float(problem.transfers[number]) - relief)
            return float(problem.offload_seconds[number]) + relief + price * freed

        def gain(number: int) -> float:
            if number not in self.recomputed:
                return offloading(number)
            spared = sum(offloading(n) / users[n] for n in problem.sources((number,)))
            return problem.replay_seconds(number) + spared

        return {number: gain(number) for number in numbers}

    def _price(self) -> float:
        """Return the worth of a free second of the link: the recomputing time that it saves."""
        dear = (
            self._seconds_saved(n)
            for n in self.recomputed
            if self.problem.could_be_offloaded_in_time(n)
        )
        return min(1.0, max(dear, default=0.0))


def _kept_in_order(state: _State) -> Schedule:
    """Keep one value after the other, first those that save most for what they add to the peak."""
    problem = state.problem
    least = problem.limit(state.recomputed)
    until = [0] * len(problem.values)
    for number in state.recomputed:
        until[number] = len(until) + 1
    order: list[int] = []
    peaks = [least]
    left = {
        n
        for n, value in enumerate(problem.values)
        if value.is_offloadable and value.nbytes and not value.is_only_a_source
    }
    while left:
        number = _next(state, left)
        left.discard(number)
        order.append(number)
        state.kept.add(number)
        gone = [number] if number in state.recomputed else []
        state.recomputed.discard(number)
        for one in (*gone, *state.offload_while_idle()):
            until[one] = len(order)
        peak = problem.peak(state.kept, state.recomputed)
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
    kept, recomputed = state.kept, state.recomputed
    needed = problem.needed(kept, recomputed)
    live = problem.live(kept, recomputed)
    before, after = np.maximum.accumulate(live), np.maximum.accumulate(live[::-1])[::-1]
    peak, gains = int(before[-1]), state.gains(left)

    def rank(number: int) -> tuple[float, int, int]:
        nbytes, first = problem.values[number].nbytes, needed[number].first
        new = max(int(after[first]), int(before[first - 1]) + nbytes if first else 0)
        # Values that add nothing to the peak come before all others, by what they save.
        return -gains[number] / max(new - peak, 1), first, number

    return min(left, key=rank)
