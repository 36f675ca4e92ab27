"""Chooses what a pair of graphs keeps, offloads and computes again, and when each fetch begins.

The forward graph hands values to the backward graph. What is kept is on the device from the end of
the forward graph to its last use; what is offloaded from its fetch on; what is computed again from
its first use on. The **peak** is the most bytes that lie there so at any moment.

What leaves costs the link time, which is free while the graphs compute: a transfer out begins when
its value is made and those before it are gone, and by the end of the forward graph all should be.
So, with nothing kept:

1. What is computed again for less than it costs to ship, though the link had time, is.
2. While the link needs longer than the forward graph, what relieves it most for its time is
   computed again too, if that takes less time than the link would.

Then values are kept, one after the other, what saves most time for what it adds to the peak first.
What is kept leaves the link time, in which what is dearest to compute is shipped after all. A
budget decides how many are kept: the kept sets are nested, so the peak grows with the budget, and
it never exceeds it. A fetch begins as early as its transfer needs, but not before there is room.

Everything here is pure: no graph, device or clock.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storm_client.plan.decisions import OFFLOAD, REPLAY, Decision, Keep
from storm_client.plan.planner import Costs

__all__ = ["Draft", "Recipe", "Saved", "Schedule", "schedule", "seconds_of_choice"]

STALL_SHARE = 0.01
"""Of the backward graph's time, what fetches may be late together to need less memory."""

AHEAD_STEPS = 8
"""Sizes that are tried of the memory for fetches ahead of use."""

_NEVER = -1
"""The last use of a value that only others are computed from."""


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
    made: float = 0.0
    """When the forward graph has made it, in seconds after its beginning."""
    ratio: float = 1.0
    """By how much it is compressed on the link."""

    @classmethod
    def only_a_source(cls, nbytes: int, **more: float) -> Saved:
        """Return a value that is handed over only where another is computed again from it."""
        return cls(nbytes, 0, _NEVER, **more)  # type: ignore[arg-type]  # made and ratio

    @property
    def is_only_a_source(self) -> bool:
        """Whether the backward graph does not use it by itself."""
        return self.last_use == _NEVER


class _Interval(NamedTuple):
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Draft:
    """What becomes of the values of one pair of graphs."""

    decisions: tuple[Decision, ...]
    is_handed: tuple[bool, ...]
    """Whether each is handed over at all, if it is not computed again."""
    first_uses: tuple[int, ...]
    """Where each value has to be there: earlier than its own use where others are made from it."""
    fetches: tuple[int, ...]
    """The position before which the fetch of each value begins."""
    link_seconds: float
    """Of the link, one way."""
    replay_seconds: float
    stall_seconds: float
    """For which the forward graph's end and waits in the backward graph are late, by estimate."""


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
    """Each value is computed again while fewer than so many of `order` are kept."""
    problem: _Problem

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

        Where a run decides what is kept, `in_runs`, they are offloaded by decision.
        """
        again = frozenset(n for n, until in enumerate(self.again_until) if count < until)
        kept = frozenset() if in_runs else frozenset(self.order[:count])
        return self.problem.draft(kept, again, self.peaks[0 if in_runs else count])


def schedule(
    values: Sequence[Saved],
    seconds: Sequence[float],
    costs: Costs,
    forward_seconds: float | None = None,
    *,
    latency: float = 0.0,
) -> Schedule:
    """Return the schedule of values that are used in a backward graph.

    `seconds` is how long the node at each position of that graph takes, `forward_seconds` how long
    the forward graph does; None where transfers hide behind nothing, and cost what `costs` say of
    the processor. A fetch takes `latency` more than the link, however small it is.
    """
    problem = _Problem(tuple(values), tuple(seconds), costs, forward_seconds, latency)
    state = _State(problem)
    state.compute_cheap()
    state.relieve_link()
    state.ship_what_fits()
    return _kept_in_order(state)


def seconds_of_choice(schedule: Schedule, kept: Iterable[int], again: Iterable[int]) -> float:
    """Return what a choice costs a step, by the estimate that the schedule goes by."""
    return schedule.problem.total(frozenset(kept), frozenset(again))


@dataclass(frozen=True)
class _Problem:
    values: tuple[Saved, ...]
    seconds: tuple[float, ...]
    costs: Costs
    forward_seconds: float | None
    latency: float

    @cached_property
    def transfers(self) -> npt.NDArray[np.float64]:
        """Seconds of the link for each value, one way."""
        return np.array([v.nbytes * self.costs.link / v.ratio for v in self.values])

    @cached_property
    def _made(self) -> npt.NDArray[np.float64]:
        return np.array([value.made for value in self.values])

    @cached_property
    def ships(self) -> npt.NDArray[np.float64]:
        costs = self.costs
        return np.array([v.nbytes * costs.shipping + costs.ship_floor for v in self.values])

    @cached_property
    def _backward_seconds(self) -> float:
        return sum(self.seconds)

    def replay_seconds(self, number: int) -> float:
        recipe = self.values[number].recipe
        return math.inf if recipe is None else max(recipe.seconds, self.costs.replay_floor)

    def sources(self, again: Iterable[int]) -> set[int]:
        """Return what values are computed from that nothing else uses."""
        found = set()
        for number in again:
            recipe = self.values[number].recipe
            assert recipe is not None
            found |= {n for n in recipe.sources if self.values[n].is_only_a_source}
        return found

    def is_handed(self, kept: frozenset[int], again: frozenset[int]) -> list[bool]:
        used = self.sources(again - kept)
        return [not v.is_only_a_source or n in used for n, v in enumerate(self.values)]

    def leaves(self, kept: frozenset[int], again: frozenset[int]) -> npt.NDArray[np.bool_]:
        """Tell of each value whether it is shipped."""
        return np.array(
            [
                handed and value.can_leave and n not in kept and n not in again
                for n, (value, handed) in enumerate(
                    zip(self.values, self.is_handed(kept, again), strict=True)
                )
            ],
            dtype=bool,
        )

    def late(self, leaves: npt.NDArray[np.bool_]) -> float:
        """Return by how much the link is done later than the graph beside which it works."""
        if self.forward_seconds is None or not leaves.any():
            return 0.0
        taken, made = self.transfers[leaves], self._made[leaves]
        until = np.cumsum(taken)
        done = until + np.maximum.accumulate(made - (until - taken))
        back = float(until[-1]) - self._backward_seconds
        return max(0.0, float(done[-1]) - self.forward_seconds, back)

    def reliefs(self, leaves: npt.NDArray[np.bool_]) -> dict[int, float]:
        """Return by how much less late the link is done without each of what it carries."""
        late = self.late(leaves)
        if late <= 0.0 or self.forward_seconds is None:
            return {}
        taken, made = self.transfers[leaves], self._made[leaves]
        ends = made + np.cumsum(taken[::-1])[::-1]  # where the link is never idle from there on
        never = np.array([-np.inf])
        before = np.concatenate((never, np.maximum.accumulate(ends)[:-1])) - taken
        behind = np.concatenate((np.maximum.accumulate(ends[::-1])[::-1][1:], never))
        back = float(taken.sum()) - taken - self._backward_seconds
        left = np.maximum(np.maximum(before, behind) - self.forward_seconds, back)
        found = late - np.maximum(left, 0.0)
        return dict(zip(map(int, np.flatnonzero(leaves)), map(float, found), strict=True))

    def could_leave_in_time(self, number: int) -> bool:
        """Tell whether a value could be gone by the end of the forward graph."""
        end = self.values[number].made + float(self.transfers[number])
        return self.forward_seconds is None or end <= self.forward_seconds

    def total(self, kept: frozenset[int], again: frozenset[int]) -> float:
        """Return what a choice costs a step, in seconds."""
        leaves = self.leaves(kept, again)
        replays = sum(self.replay_seconds(n) for n in again - kept)
        return float(self.ships[leaves].sum()) + replays + self.late(leaves)

    # --- memory ---------------------------------------------------------------------------------

    def needed(self, kept: frozenset[int], again: frozenset[int]) -> list[_Interval]:
        """Return when each value has to be there, for its own uses and for what is made from it."""
        end = len(self.seconds)
        found = [
            _Interval(end if v.is_only_a_source else v.first_use, v.last_use) for v in self.values
        ]
        for number in reversed(range(len(self.values))):
            recipe = self.values[number].recipe
            if number not in again or number in kept or recipe is None:
                continue
            use = found[number].first
            for source in recipe.sources:
                first, last = found[source]
                found[source] = _Interval(min(first, use), max(last, use))
        return found

    def live(self, kept: frozenset[int], again: frozenset[int]) -> npt.NDArray[np.int64]:
        """Return the bytes at each position if nothing is fetched ahead of its use."""
        changes = np.zeros(len(self.seconds) + 2, dtype=np.int64)
        for number, (value, (first, last)) in enumerate(
            zip(self.values, self.needed(kept, again), strict=True)
        ):
            if last == _NEVER:
                continue
            changes[0 if number in kept or not value.can_leave else first] += value.nbytes
            changes[last + 1] -= value.nbytes
        return np.cumsum(changes)[:-1]

    def peak(self, kept: frozenset[int], again: frozenset[int]) -> int:
        return int(self.live(kept, again).max(initial=0))

    # --- the backward graph ---------------------------------------------------------------------

    def draft(self, kept: frozenset[int], again: frozenset[int], limit: int) -> Draft:
        """Return a choice with its fetches, which take the peak to `limit` bytes at the most."""
        again -= kept
        leaves = self.leaves(kept, again)
        needed = self.needed(kept, again)
        begins = self._begins(again, needed)
        fetches = self._fetches(leaves, needed, begins, self.live(kept, again), limit)
        stall = self.late(leaves) + self._waits(leaves, needed, begins, fetches)
        decisions: list[Decision] = []
        for number, value in enumerate(self.values):
            if not value.can_leave:
                decisions.append(Keep("cannot leave"))
            elif number in kept:
                decisions.append(Keep("budget"))
            else:
                decisions.append(REPLAY if number in again else OFFLOAD)
        return Draft(
            tuple(decisions),
            tuple(self.is_handed(kept, again)),
            tuple(one.first for one in needed),
            tuple(fetches),
            float(self.transfers[leaves].sum()),
            sum(map(self.replay_seconds, again)),
            stall,
        )

    def limit(self, again: frozenset[int]) -> int:
        """Return a peak with nothing kept that leaves room for fetches to be in time."""
        try_limit = self._fetching(again)
        least, total = self.peak(frozenset(), again), sum(v.nbytes for v in self.values)
        shortest, most = try_limit(total)
        allowed = shortest + STALL_SHARE * self._backward_seconds
        for step in range(AHEAD_STEPS):
            taken, reached = try_limit(least + (most - least) * step // AHEAD_STEPS)
            if taken <= allowed:
                return reached
        return most

    def peak_in_time(self, again: frozenset[int]) -> int:
        """Return the peak with nothing kept if every fetch begins when it has to, to be in time."""
        return self._fetching(again)(sum(v.nbytes for v in self.values))[1]

    def _fetching(self, again: frozenset[int]) -> Callable[[int], tuple[float, int]]:
        """Return what tells, for a limit, how long fetches are waited for, and the peak."""
        kept: frozenset[int] = frozenset()
        leaves, needed = self.leaves(kept, again), self.needed(kept, again)
        begins, live = self._begins(again, needed), self.live(kept, again)

        def waits(limit: int) -> tuple[float, int]:
            there = live.copy()
            fetches = self._fetches(leaves, needed, begins, there, limit)
            return self._waits(leaves, needed, begins, fetches), int(there.max(initial=0))

        return waits

    def _begins(self, again: frozenset[int], needed: Sequence[_Interval]) -> list[float]:
        """Return when each position begins, with what is computed again before it."""
        taken = list(self.seconds)
        for number in again:
            if taken:
                taken[min(needed[number].first, len(taken) - 1)] += self.replay_seconds(number)
        return list(accumulate(taken, initial=0.0))

    def _fetches(
        self,
        leaves: npt.NDArray[np.bool_],
        needed: Sequence[_Interval],
        begins: Sequence[float],
        live: npt.NDArray[np.int64],
        limit: int,
    ) -> list[int]:
        """Return where each fetch begins, and add to `live` what that takes, up to `limit`.

        The link carries one value at a time, in the order of use. Going back from the last, each
        transfer has to end before its use and before the next begins; then, going forward, each is
        put off until there is memory for it.
        """
        positions = [one.first for one in needed]
        shipped = map(int, np.flatnonzero(leaves))
        by_use = sorted(shipped, key=lambda n: (needed[n].first, n))
        free = begins[-1]
        for number in reversed(by_use):
            ready = begins[needed[number].first] - self.latency
            free = min(free, ready) - self.transfers[number]
            positions[number] = max(0, bisect_right(begins, free) - 1)
        for number in by_use:
            use, nbytes = needed[number].first, self.values[number].nbytes
            full = np.flatnonzero(live[positions[number] : use] + nbytes > limit)
            if full.size:
                positions[number] += int(full[-1]) + 1
            live[positions[number] : use] += nbytes
        return positions

    def _waits(
        self,
        leaves: npt.NDArray[np.bool_],
        needed: Sequence[_Interval],
        begins: Sequence[float],
        fetches: Sequence[int],
    ) -> float:
        """Return for how long the backward graph waits for fetches that come too late."""
        shipped = [int(n) for n in np.flatnonzero(leaves)]
        waited, free = 0.0, 0.0
        begun: dict[int, float] = {}
        events = [(fetches[n], 0, needed[n].first, n) for n in shipped]
        events += [(needed[n].first, 1, needed[n].first, n) for n in shipped]
        for position, is_use, _, number in sorted(events):
            now = begins[position] + waited
            if is_use:
                waited += max(0.0, begun[number] + self.latency - now)
            else:
                free = begun[number] = max(free, now) + float(self.transfers[number])
        return waited


@dataclass
class _State:
    """What was decided so far; nothing that is in neither set stays or is computed again."""

    problem: _Problem
    kept: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    _peak: int = -1

    def compute_cheap(self) -> None:
        """Compute again what costs less than shipping does where the link has time."""
        self._take_best(lambda _late, _relieved, seconds: max(0.0, -seconds))

    def relieve_link(self) -> None:
        """Compute dearer values again while the link needs longer than the graphs compute."""

        def worth(late: float, relieved: float, seconds: float) -> float:
            if late <= 0.0 or relieved <= seconds:
                return 0.0
            return relieved / max(seconds, 1e-12)

        self._take_best(worth)

    def _take_best(self, worth: Callable[[float, float, float], float]) -> None:
        """Compute again what is worth most, as long as something is worth anything.

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
        """Return what may be computed again: each value, and those together that share sources."""
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
        """Count what is computed again from each value that nothing else uses."""
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
