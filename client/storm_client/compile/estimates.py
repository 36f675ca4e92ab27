"""Estimates what a choice costs a pair of graphs: link and computing time, memory, and fetches.

The forward graph saves values for the backward graph. A kept value is on the device from the end of
the forward graph to its last use, an offloaded value from its fetch on, and a recomputed value from
its first use on. The **peak** is the most bytes of these on the device at any moment.

Offloading costs time of the link, which is free while the graphs compute. A value's transfer begins
when the value is made and all transfers before it have ended. By the end of the forward graph all
should have ended. A fetch begins as early as its transfer needs, but not before there is memory for
it.

All code here is pure: it uses no graph, device or clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from storm_client.planner.decisions import OFFLOAD, REPLAY, Decision, Keep, Offload
from storm_client.planner.machine import Machine

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Draft", "Problem", "Recipe", "Saved"]

STALL_SHARE = 0.01
"""The share of the backward graph's time by which fetches may be late together, to need less
memory."""

AHEAD_STEPS = 8
"""How many sizes of the memory for prefetches are tried."""

_NEVER = -1
"""The last use of a value that is only a source of others."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a saved value is recomputed in the backward graph."""

    seconds: float
    sources: tuple[int, ...] = ()
    """The saved values, by number, that it is computed from. Each was made before it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that the forward graph saves for the backward graph, in the order of creation."""

    nbytes: int
    first_use: int
    """The position in the backward graph of the node that uses it first."""
    last_use: int
    is_offloadable: bool = True
    recipe: Recipe | None = None
    made: float = 0.0
    """When the forward graph has made it, in seconds that the link can use until then."""
    ratio: float = 1.0
    """The compression ratio on the link."""

    @classmethod
    def only_a_source(cls, nbytes: int, **more: float) -> Saved:
        """Return a value that is saved only where another is recomputed from it."""
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
    """The decisions for the values of one pair of graphs."""

    decisions: tuple[Decision, ...]
    is_saved: tuple[bool, ...]
    """Whether each value is saved at all, if it is not recomputed."""
    first_uses: tuple[int, ...]
    """Where each value must be present: before its own use if others are recomputed from it."""
    fetches: tuple[int, ...]
    """The position before which the fetch of each value begins."""
    free_bytes_from: tuple[int, ...]
    """Bytes below the peak that are free from each position of the backward graph on."""
    link_seconds: float
    """Seconds of the link, one way."""
    replay_seconds: float
    stall_seconds: float
    """Estimated seconds: the delay of the forward graph's end, and waits in the backward graph."""

    def offloaded(self) -> list[int]:
        """Return the numbers of the offloaded values."""
        both = zip(self.decisions, self.is_saved, strict=True)
        return [n for n, (one, saved) in enumerate(both) if isinstance(one, Offload) and saved]

    def by_use(self) -> list[int]:
        """Return the same, in the order in which the backward graph waits for them."""
        return sorted(self.offloaded(), key=lambda n: (self.first_uses[n], n))

    def by_fetch(self) -> list[int]:
        """Return the same, in the order in which their fetches begin."""
        return sorted(self.offloaded(), key=lambda n: (self.fetches[n], self.first_uses[n], n))


@dataclass(frozen=True)
class Problem:
    """The values of one pair of graphs, and the time and memory that a choice takes."""

    values: tuple[Saved, ...]
    seconds: tuple[float, ...]
    machine: Machine
    forward_seconds: float | None
    """For how long the link can transfer beside the forward graph; None where nothing hides
    transfers."""

    @cached_property
    def transfers(self) -> npt.NDArray[np.float64]:
        """Seconds of the link for each value, one way."""
        return np.array([v.nbytes * self.machine.link / v.ratio for v in self.values])

    @cached_property
    def _made(self) -> npt.NDArray[np.float64]:
        return np.array([value.made for value in self.values])

    @cached_property
    def offload_seconds(self) -> npt.NDArray[np.float64]:
        machine = self.machine
        return np.array([v.nbytes * machine.codec + machine.graph_store for v in self.values])

    @cached_property
    def _backward_seconds(self) -> float:
        return sum(self.seconds)

    def replay_seconds(self, number: int) -> float:
        recipe = self.values[number].recipe
        return math.inf if recipe is None else max(recipe.seconds, self.machine.thread_recompute)

    def sources(self, recomputed: Iterable[int]) -> set[int]:
        """Return the sources from which values are recomputed and that nothing else uses."""
        found = set()
        for number in recomputed:
            recipe = self.values[number].recipe
            assert recipe is not None
            found |= {n for n in recipe.sources if self.values[n].is_only_a_source}
        return found

    def is_saved(self, kept: Set[int], recomputed: Set[int]) -> list[bool]:
        used = self.sources(recomputed - kept)
        return [not v.is_only_a_source or n in used for n, v in enumerate(self.values)]

    def is_offloaded(self, kept: Set[int], recomputed: Set[int]) -> npt.NDArray[np.bool_]:
        """Return for each value whether it is offloaded."""
        return np.array(
            [
                saved and value.is_offloadable and n not in kept and n not in recomputed
                for n, (value, saved) in enumerate(
                    zip(self.values, self.is_saved(kept, recomputed), strict=True)
                )
            ],
            dtype=bool,
        )

    def late(self, offloaded: npt.NDArray[np.bool_]) -> float:
        """Return by how many seconds the link ends later than the graph that runs beside it."""
        if self.forward_seconds is None or not offloaded.any():
            return 0.0
        taken, made = self.transfers[offloaded], self._made[offloaded]
        until = np.cumsum(taken)
        done = until + np.maximum.accumulate(made - (until - taken))
        back = float(until[-1]) - self._backward_seconds
        return max(0.0, float(done[-1]) - self.forward_seconds, back)

    def reliefs(self, offloaded: npt.NDArray[np.bool_]) -> dict[int, float]:
        """Return by how many seconds the link would be less late without each offloaded value."""
        late = self.late(offloaded)
        if late <= 0.0 or self.forward_seconds is None:
            return {}
        taken, made = self.transfers[offloaded], self._made[offloaded]
        ends = made + np.cumsum(taken[::-1])[::-1]  # if the link is never idle from there on
        never = np.array([-np.inf])
        before = np.concatenate((never, np.maximum.accumulate(ends)[:-1])) - taken
        behind = np.concatenate((np.maximum.accumulate(ends[::-1])[::-1][1:], never))
        back = float(taken.sum()) - taken - self._backward_seconds
        left = np.maximum(np.maximum(before, behind) - self.forward_seconds, back)
        found = late - np.maximum(left, 0.0)
        return dict(zip(map(int, np.flatnonzero(offloaded)), map(float, found), strict=True))

    def could_be_offloaded_in_time(self, number: int) -> bool:
        """Return whether a value's transfer could end by the end of the forward graph."""
        end = self.values[number].made + float(self.transfers[number])
        return self.forward_seconds is None or end <= self.forward_seconds

    # --- memory ---------------------------------------------------------------------------------

    def needed(self, kept: Set[int], recomputed: Set[int]) -> list[_Interval]:
        """Return when each value must be present, for its own uses and as a source of others."""
        end = len(self.seconds)
        found = [
            _Interval(end if v.is_only_a_source else v.first_use, v.last_use) for v in self.values
        ]
        for number in reversed(range(len(self.values))):
            recipe = self.values[number].recipe
            if number not in recomputed or number in kept or recipe is None:
                continue
            use = found[number].first
            for source in recipe.sources:
                first, last = found[source]
                found[source] = _Interval(min(first, use), max(last, use))
        return found

    def live(self, kept: Set[int], recomputed: Set[int]) -> npt.NDArray[np.int64]:
        """Return the bytes at each position if nothing is prefetched."""
        changes = np.zeros(len(self.seconds) + 2, dtype=np.int64)
        for number, (value, (first, last)) in enumerate(
            zip(self.values, self.needed(kept, recomputed), strict=True)
        ):
            if last == _NEVER:
                continue
            changes[0 if number in kept or not value.is_offloadable else first] += value.nbytes
            changes[last + 1] -= value.nbytes
        return np.cumsum(changes)[:-1]

    def peak(self, kept: Set[int], recomputed: Set[int]) -> int:
        return int(self.live(kept, recomputed).max(initial=0))

    # --- the backward graph ---------------------------------------------------------------------

    def draft(self, kept: Set[int], recomputed: Set[int], limit: int) -> Draft:
        """Return a choice's decisions, and fetches that raise the peak to at most `limit` bytes."""
        recomputed = recomputed - kept
        offloaded = self.is_offloaded(kept, recomputed)
        needed = self.needed(kept, recomputed)
        begins = self._begins(recomputed, needed)
        live = self.live(kept, recomputed)
        fetches = self._fetches(offloaded, needed, begins, live, limit)
        most = np.maximum.accumulate(live[::-1])[::-1]
        stall = self.late(offloaded) + self._waits(offloaded, needed, begins, fetches)
        decisions: list[Decision] = []
        for number, value in enumerate(self.values):
            if not value.is_offloadable:
                decisions.append(Keep("cannot be offloaded"))
            elif number in kept:
                decisions.append(Keep("budget"))
            else:
                decisions.append(REPLAY if number in recomputed else OFFLOAD)
        return Draft(
            tuple(decisions),
            tuple(self.is_saved(kept, recomputed)),
            tuple(one.first for one in needed),
            tuple(fetches),
            tuple(max(0, limit - int(one)) for one in most),
            float(self.transfers[offloaded].sum()),
            sum(map(self.replay_seconds, recomputed)),
            stall,
        )

    def limit(self, recomputed: Set[int]) -> int:
        """Return a peak with nothing kept that leaves memory for fetches to be in time."""
        try_limit = self._fetching(recomputed)
        least, total = self.peak(frozenset(), recomputed), sum(v.nbytes for v in self.values)
        shortest, most = try_limit(total)
        allowed = shortest + STALL_SHARE * self._backward_seconds
        for step in range(AHEAD_STEPS):
            taken, reached = try_limit(least + (most - least) * step // AHEAD_STEPS)
            if taken <= allowed:
                return reached
        return most

    def peak_in_time(self, recomputed: Set[int]) -> int:
        """Return the peak with nothing kept if every fetch begins early enough to be in time."""
        return self._fetching(recomputed)(sum(v.nbytes for v in self.values))[1]

    def _fetching(self, recomputed: Set[int]) -> Callable[[int], tuple[float, int]]:
        """Return a function from a limit to the seconds that fetches are late, and the peak."""
        kept: Set[int] = frozenset()
        offloaded, needed = self.is_offloaded(kept, recomputed), self.needed(kept, recomputed)
        begins, live = self._begins(recomputed, needed), self.live(kept, recomputed)

        def waits(limit: int) -> tuple[float, int]:
            filled = live.copy()
            fetches = self._fetches(offloaded, needed, begins, filled, limit)
            return self._waits(offloaded, needed, begins, fetches), int(filled.max(initial=0))

        return waits

    def _begins(self, recomputed: Set[int], needed: Sequence[_Interval]) -> list[float]:
        """Return when each position begins, with the recomputation before it."""
        taken = list(self.seconds)
        for number in recomputed:
            if taken:
                taken[min(needed[number].first, len(taken) - 1)] += self.replay_seconds(number)
        return list(accumulate(taken, initial=0.0))

    def _fetches(
        self,
        offloaded: npt.NDArray[np.bool_],
        needed: Sequence[_Interval],
        begins: Sequence[float],
        live: npt.NDArray[np.int64],
        limit: int,
    ) -> list[int]:
        """Return the position where each fetch begins, and add its bytes to `live`, up to `limit`.

        The link carries one value at a time, in the order of use. Going backward from the last,
        each transfer has to end before its use and before the next one begins. Then, going forward,
        each is delayed until there is memory for it.
        """
        positions = [one.first for one in needed]
        numbers = map(int, np.flatnonzero(offloaded))
        by_use = sorted(numbers, key=lambda n: (needed[n].first, n))
        free = begins[-1]
        for number in reversed(by_use):
            ready = begins[needed[number].first] - self.machine.fetch_latency
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
        offloaded: npt.NDArray[np.bool_],
        needed: Sequence[_Interval],
        begins: Sequence[float],
        fetches: Sequence[int],
    ) -> float:
        """Return for how many seconds the backward graph waits for late fetches."""
        numbers = [int(n) for n in np.flatnonzero(offloaded)]
        waited, free = 0.0, 0.0
        begun: dict[int, float] = {}
        events = [(fetches[n], 0, needed[n].first, n) for n in numbers]
        events += [(needed[n].first, 1, needed[n].first, n) for n in numbers]
        for position, is_use, _, number in sorted(events):
            now = begins[position] + waited
            if is_use:
                waited += max(0.0, begun[number] + self.machine.fetch_latency - now)
            else:
                free = begun[number] = max(free, now) + float(self.transfers[number])
        return waited
