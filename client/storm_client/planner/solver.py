"""Chooses what of a step is kept, offloaded and recomputed.

What is not kept costs one of two things. An offloaded byte takes time on the link, which is free
while computing hides it, and a little of the processor that encodes and decodes it. A recomputed
byte takes the time of its operation, in the backward pass. Given a price for a byte on the link:

1. What cannot be recomputed and is asked for before the link could have offloaded it is kept: to
   offload it would free nothing. The output of a loss' softmax is that, the largest of many models.
2. What saves most time for its bytes is kept, as far as the budget goes.
3. What is recomputed for less than offloading it costs is recomputed.
4. While the link needs longer than the forward pass, more expensive values are recomputed, first
   those that relieve the link most for their time.
5. What is left of the budget keeps what was to be offloaded or recomputed after all.
6. If the link still needs longer, what was saved last is kept, up to the in-flight limit: it is
   asked for first, before the link would have offloaded it.

The price is between nothing, where computing hides the link, and the whole time of the byte, where
it does not. Which is right shows only at the end, and so does whether what the budget keeps is
better chosen before or after the rest. So a few prices are tried both ways, and the cheapest choice
is taken. Each is the greedy solution of a fractional knapsack.

Everything here is pure: no tensor, device or clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from storm_client.planner.decisions import LAST, OFFLOAD, REPLAY, Decision, Keep
from storm_client.planner.machine import Machine
from storm_client.planner.prices import Priced, operation_seconds
from storm_client.planner.problem import Problem, Value

__all__ = ["Choice", "choose"]

MOST_DEPTH = 16
"""Operations in a row that recompute a value from what is stored."""

MOST_IN_BLOCK = 48
"""The same once what rests on a value is recomputed from what that is recomputed from."""

MOST_LOOKS = 100
"""Operations looked at for one way: where values rest on each other crosswise there is no end."""

MANY_VALUES = 2000
"""From so many on one price alone is tried."""

TURNAROUND = 3.0
"""Seconds from the making of a value to its use in the backward pass, for each that the forward
pass computes behind it: that second, and two of the backward pass."""

LINK_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Prices of a byte on the link that are tried, as shares of its whole time."""


class Choice(NamedTuple):
    """What was decided for each value, and what it comes to. Bytes and seconds of one step."""

    decisions: list[Decision]
    reasons: list[str]
    costs: list[float]
    """Seconds: of the operation where a value is recomputed, of the link where it is offloaded."""
    kept_bytes: int
    link_seconds: float
    """One way."""
    replay_seconds: float
    """Of recomputed operations."""
    forward_seconds: float
    """What the link was taken to have."""


def choose(problem: Problem, machine: Machine, *, budget_bytes: int = 0) -> Choice:
    """Return what becomes of each value of a step if `budget_bytes` of them may be kept.

    Where the forward pass was not timed, the link has what its known operations take together.
    """
    values = problem.values
    seconds = operation_seconds(values, machine)
    window = problem.forward_seconds
    if window is None:
        window = sum(filter(math.isfinite, seconds))
    priced = Priced(problem, machine, seconds, budget_bytes, window)
    states = [
        _chosen(priced, machine.codec + share * machine.link, gains)
        for share in (LINK_SHARES if len(values) < MANY_VALUES else LINK_SHARES[:1])
        for gains in ((None, _gains_alone, _gains_of_ways) if budget_bytes else (None,))
    ]
    return _choice(min(states, key=_State.total))


class _Way(NamedTuple):
    """How a value could be recomputed."""

    seconds: float
    recomputed: Mapping[int, int]
    """The values that are recomputed for it, its own among them, with the depth of each."""
    stored: frozenset[int]
    """Values that it rests on, and that nothing else would store."""

    def cost(self, storing: Sequence[float]) -> float:
        """Return what it costs, with all that has to be stored for it."""
        return self.seconds + _sum(storing, self.stored)


class _Draft:
    """A way that is being looked for; what turns out to lead nowhere is taken back."""

    def __init__(self) -> None:
        self.looks = MOST_LOOKS
        self.seconds = 0.0
        self.recomputed: dict[int, int] = {}
        self.stored: dict[int, None] = {}

    def mark(self) -> tuple[float, int, int]:
        return self.seconds, len(self.recomputed), len(self.stored)

    def stored_since(self, mark: tuple[float, int, int]) -> list[int]:
        return list(islice(self.stored, mark[2], None))

    def back_to(self, mark: tuple[float, int, int]) -> None:
        self.seconds = mark[0]
        for added, count in ((self.recomputed, mark[1]), (self.stored, mark[2])):
            while len(added) > count:
                added.popitem()


@dataclass
class _State:
    """What was decided so far."""

    priced: Priced
    kept: set[int] = field(default_factory=set)
    """Values that the budget keeps."""
    last: set[int] = field(default_factory=set)
    """Values that are kept beside the budget, since the link has no time for them before they are
    asked for. In flight they would be on the device, too."""
    stored: set[int] = field(default_factory=set)
    stored_bytes: int = 0
    recomputed: dict[int, int] = field(default_factory=dict)
    """With the depth of each: how many operations in a row it takes from what is stored."""

    @property
    def budget_left(self) -> int:
        """How many bytes more may be kept."""
        return self.priced.budget_bytes - self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """How many bytes the budget keeps."""
        return sum(self.priced.nbytes[n] for n in self.kept)

    @property
    def link_seconds(self) -> float:
        """What the link needs one way."""
        return self.stored_bytes * self.priced.machine.link

    def total(self) -> float:
        """Return the seconds that the choice adds to the step."""
        priced = self.priced
        return (
            _sum(priced.store_seconds(priced.machine.codec), self.stored)
            + _sum(priced.recompute_seconds, self.recomputed)
            + max(0.0, self.link_seconds - priced.window)
        )

    def store(self, number: int) -> None:
        if number not in self.stored:
            self.stored.add(number)
            self.stored_bytes += self.priced.nbytes[number]

    def drop(self, number: int) -> None:
        if number in self.stored:
            self.stored.discard(number)
            self.stored_bytes -= self.priced.nbytes[number]

    def take(self, way: _Way) -> None:
        self.recomputed |= way.recomputed
        for number in way.recomputed:
            self.drop(number)
        for number in way.stored:
            self.store(number)

    # --- ways to recompute ------------------------------------------------------------------

    def way(self, number: int, storing: Sequence[float]) -> _Way | None:
        """Return a cheap way to recompute a value, or None; to store each takes so long."""
        if not self.priced.is_recomputable[number]:
            return None
        draft = _Draft()
        if self._recompute(number, storing, draft, MOST_DEPTH) is None:
            return None
        return _Way(draft.seconds, draft.recomputed, frozenset(draft.stored))

    def _recompute(
        self, number: int, storing: Sequence[float], draft: _Draft, left: int
    ) -> int | None:
        """Add to a draft how a value is recomputed; return how deep that goes, or None."""
        priced = self.priced
        if left == 0 or draft.looks == 0 or not priced.is_recomputable[number]:
            return None
        draft.looks -= 1
        mark, depth = draft.mark(), 0
        draft.seconds += priced.recompute_seconds[number]
        for source in priced.sources[number]:
            if source < 0:
                continue
            found = self._have(source, storing, draft, left - 1)
            if found is None:
                draft.back_to(mark)
                return None
            depth = max(depth, found)
        if depth >= MOST_DEPTH:
            draft.back_to(mark)
            return None
        draft.recomputed[number] = depth + 1
        return depth + 1

    def _have(self, number: int, storing: Sequence[float], draft: _Draft, left: int) -> int | None:
        """Add to a draft how an input is had: it is there, recomputed, or stored besides."""
        if number in self.stored or number in self.kept or number in self.last:
            return 0
        if number in draft.stored:
            return 0
        known = self.recomputed.get(number) or draft.recomputed.get(number)
        if known is not None:
            return known
        mark = draft.mark()
        depth = self._recompute(number, storing, draft, left)
        if depth is not None:
            more = draft.seconds - mark[0] + _sum(storing, draft.stored_since(mark))
            if more <= storing[number]:
                return depth
            draft.back_to(mark)
        draft.stored[number] = None
        return 0

    # --- steps of a choice ------------------------------------------------------------------

    def keep_what_is_asked_for_at_once(self) -> None:
        """Keep what is saved last if it is needed before the link could have offloaded it.

        That is the last value that cannot be recomputed: it is not known how long those take that
        come before it.
        """
        priced, behind = self.priced, 0.0
        for value in reversed(priced.values):
            number = value.number
            if value.is_saved and not priced.problem.may_recompute(value):
                needed = TURNAROUND * behind + priced.problem.turn_seconds
                if priced.link_seconds([number]) > needed:
                    (self.kept if value.nbytes <= self.budget_left else self.last).add(number)
                return
            behind += priced.seconds[number]

    def keep(self, gains: Mapping[int, float]) -> None:
        """Keep the values that save most for their bytes, of like ones what was saved last."""
        values, left = self.priced.values, self.budget_left
        stays = self.kept | self.last

        def order(number: int) -> tuple[float, int]:
            return gains[number] / values[number].nbytes, number

        for number in sorted(gains.keys() - stays, key=order, reverse=True):
            if values[number].nbytes <= left:
                left -= values[number].nbytes
                self.kept.add(number)

    def relieve_link(self) -> None:
        """Recompute more expensive values while the link needs longer than the forward pass."""
        if not self._is_link_behind():
            return
        storing = self.priced.store_seconds(self.priced.machine.link)
        candidates = []
        for number in sorted(self.stored, reverse=True):
            found = self._relief(number, storing)
            if found is not None:
                candidates.append((found[0], number))
        chains = _Chains(self.priced, self.recomputed)
        for _, number in sorted(candidates, reverse=True):
            if not self._is_link_behind():
                return
            found = self._relief(number, storing) if number in self.stored else None
            if found is not None and chains.may_grow(found[1].recomputed):
                self.take(found[1])

    def _is_link_behind(self) -> bool:
        behind = self.stored_bytes - self.priced.problem.last_bytes
        return behind * self.priced.machine.link > self.priced.window

    def _relief(self, number: int, storing: Sequence[float]) -> tuple[float, _Way] | None:
        """Return what recomputing a stored value spares the link, for a second that it takes.

        None where it takes longer than it spares.
        """
        priced = self.priced
        if not priced.values[number].is_saved:
            return None
        self.drop(number)
        way = self.way(number, storing)
        self.store(number)
        if way is None:
            return None
        relief = priced.link_seconds([number]) - priced.link_seconds(way.stored)
        return (relief / way.seconds, way) if relief > way.seconds else None

    def drop_what_is_not_needed(self) -> None:
        """Recompute and store only what a saved value that is not kept is or rests on."""
        stays = self.kept | self.last
        needed = {n for n in self.priced.saved if n not in stays}
        found = list(needed)
        while found:
            number = found.pop()
            if number in self.recomputed:
                sources = self.priced.sources[number]
                more = [n for n in sources if n >= 0 and n not in needed and n not in stays]
                needed.update(more)
                found += more
        self.recomputed = {n: depth for n, depth in self.recomputed.items() if n in needed}
        self.stored = needed - self.recomputed.keys()
        self.stored_bytes = sum(self.priced.nbytes[n] for n in self.stored)

    def keep_the_last(self) -> None:
        """Keep what was saved last where the link would carry it after the forward pass."""
        priced, left = self.priced, self.priced.problem.last_bytes
        for number in sorted(self.stored, reverse=True):
            if self.link_seconds <= priced.window:
                return
            nbytes = priced.nbytes[number]
            if nbytes > left:
                continue
            left -= nbytes
            self.drop(number)
            self.last.add(number)


class _Chains:
    """How many operations in a row recompute each value, from what is recomputed of none.

    What rests on a value was recomputed from it as stored, until that is recomputed, too.
    """

    def __init__(self, priced: Priced, recomputed: Iterable[int]) -> None:
        """Begin with these."""
        self._priced = priced
        self._is_looked_at = len(priced.values) < MANY_VALUES
        self._lengths: dict[int, int] = {}
        for number in sorted(recomputed):  # inputs have lower numbers, but for a few
            self._lengths[number] = self._length(number, {})
        self._is_too_long = max(self._lengths.values(), default=0) > MOST_IN_BLOCK

    def may_grow(self, recomputed: Iterable[int]) -> bool:
        """Have more values be recomputed, unless too many operations in a row are run then."""
        if not self._is_looked_at:
            return True
        if self._is_too_long:
            return False
        grown: dict[int, int] = {}
        waiting = sorted(number for number in recomputed if number not in self._lengths)
        added = set(waiting)
        while waiting:
            number = heappop(waiting)
            length = self._length(number, grown)
            if length > MOST_IN_BLOCK:
                return False
            if grown.get(number, self._lengths.get(number)) == length:
                continue
            grown[number] = length
            for behind in self._priced.made_from[number]:
                if behind in self._lengths and behind not in added:
                    heappush(waiting, behind)
        self._lengths |= grown
        return True

    def _length(self, number: int, grown: Mapping[int, int]) -> int:
        sources = (n for n in self._priced.sources[number] if n < number)
        known = (grown.get(n) or self._lengths.get(n, 0) for n in sources)
        return 1 + max(known, default=0)


def _chosen(
    priced: Priced,
    rate: float,
    gains: Callable[[Priced, Sequence[float]], dict[int, float]] | None,
) -> _State:
    """Return the choice where an offloaded byte costs `rate`.

    What the budget keeps is chosen first, by these `gains`; without them at the end.
    """
    state = _State(priced)
    state.keep_what_is_asked_for_at_once()
    storing = priced.store_seconds(rate)
    if gains is not None:
        state.keep(gains(priced, storing))
    for number in priced.saved:
        if number in state.recomputed or number in state.kept or number in state.last:
            continue
        way = state.way(number, storing)
        if way is not None and way.cost(storing) < storing[number]:
            state.take(way)
        else:
            state.store(number)
    state.relieve_link()
    if state.budget_left > 0:
        state.keep(_gains_left(state, storing))
    state.drop_what_is_not_needed()
    state.keep_the_last()
    return state


def _gains_alone(priced: Priced, storing: Sequence[float]) -> dict[int, float]:
    """Return what each saved value costs unless it is kept, where its inputs are at hand."""
    gains = {}
    for number in priced.saved:
        gains[number] = storing[number]
        if priced.problem.may_recompute(priced.values[number]):
            gains[number] = min(gains[number], priced.recompute_seconds[number])
    return gains


def _gains_of_ways(priced: Priced, storing: Sequence[float]) -> dict[int, float]:
    """Return what each saved value costs unless it is kept, where all others are at hand."""
    gains = {}
    others = _State(priced)
    for number in priced.saved:
        others.store(number)
    for number in priced.saved:
        others.drop(number)
        way = others.way(number, storing)
        others.store(number)
        alone = storing[number]
        gains[number] = alone if way is None else min(alone, way.cost(storing))
    return gains


def _gains_left(state: _State, storing: Sequence[float]) -> dict[int, float]:
    """Return what each saved value costs as it has been decided."""
    priced = state.priced
    return {
        number: (priced.recompute_seconds if number in state.recomputed else storing)[number]
        for number in priced.saved
        if number not in state.kept
    }


def _sum(seconds: Sequence[float], numbers: Iterable[int]) -> float:
    """Return what some values take together, of which each takes so many `seconds`."""
    return sum(seconds[number] for number in numbers)


def _choice(state: _State) -> Choice:
    priced = state.priced
    decided = [_decided(state, value) for value in priced.values]
    return Choice(
        [decision for decision, _, _ in decided],
        [reason for _, reason, _ in decided],
        [cost for _, _, cost in decided],
        kept_bytes=state.kept_bytes,
        link_seconds=state.link_seconds,
        replay_seconds=sum(priced.seconds[n] for n in state.recomputed),
        forward_seconds=priced.window,
    )


def _decided(state: _State, value: Value) -> tuple[Decision, str, float]:
    """Return what becomes of a value, why, and the seconds that it costs."""
    priced, number = state.priced, value.number
    link = priced.link_seconds([number])
    if number in state.kept:
        return Keep("budget"), "the budget has room", 0.0
    if number in state.last:
        return LAST, "asked for before the link would have offloaded it", 0.0
    if number in state.recomputed:
        return REPLAY, "cheaper to recompute than to transfer", priced.seconds[number]
    if number not in state.stored:
        return OFFLOAD, "not saved", 0.0
    if value.is_saved:
        why = priced.problem.why_not_recomputed(number) or _why_offloaded(value)
        return OFFLOAD, why, link
    return OFFLOAD, "others are recomputed from it", link


def _why_offloaded(value: Value) -> str:
    if not value.operation:
        return "no operation is known that recomputes it"
    if value.is_expensive:
        return "the link has time for it"
    return "cheaper to transfer than to recompute"
