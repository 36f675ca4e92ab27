"""Chooses what is kept, offloaded and made again in a kind of step, from what the parts cost.

What a step gives up it pays for in one of two ways. An offloaded byte takes time on the link, which
is free while computing hides it, and a little of the processor, which encodes and decodes it. A
byte that is made again takes the time of its operation, in the backward pass. So, given a price for
a byte on the link:

1. What nothing can make again and is asked for before the link could have taken it stays: shipping
   it would free nothing. The output of a loss' softmax is that, the largest of many models.
2. What saves most time for its bytes stays, as far as the budget has room.
3. What is made again for less than shipping it costs is made again.
4. As long as the forward pass computes for less time than its link needs, dearer values are made
   again, those first that relieve the link most for their time.
5. What room is left is used for what was given up after all.
6. If the link still needs longer, what was saved last stays: it is asked for first, before the link
   would have taken it, so that shipping it would free nothing. That is as much as may be on its way
   at any time.

The price is between nothing, where computing hides the link, and the whole time of the byte, where
it does not. Which is right shows only at the end, and so does whether what is to stay is better
chosen before or after the rest: a few prices are tried both ways, and the cheapest choice is taken.
Each is the greedy solution of a fractional knapsack. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from storm_client.eager.signature import Value
from storm_client.planner.decisions import LAST, OFFLOAD, REPLAY, Decision, Keep

__all__ = ["CPU_COSTS", "CUDA_COSTS", "Choice", "Costs", "choose", "operation_seconds"]

DEEPEST = 16
"""Operations in a row that make a value again from what is stored."""

MOST_LOOKS = 100
"""Operations looked at for one way: where values rest on each other crosswise there is no end."""

MANY_VALUES = 2000
"""From so many on one price alone is tried."""

TURNAROUND = 3.0
"""How long it is from the making of a value to its use in the backward pass, for a second that is
computed behind it in the forward pass: that second, and two of its backward pass."""

LINK_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Prices of a byte on the link that are tried, as shares of its whole time."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What giving up and getting back costs. Seconds a byte of a tensor, or seconds a tensor."""

    link: float
    """Of the link, one way, for a byte that is not compressed."""
    shipping: float
    """Of the processor that trains: it encodes, decodes and shares its memory."""
    ship_floor: float
    """What the smallest offloaded tensor costs the training thread."""
    replay_floor: float
    """What the cheapest operation that is run again costs it."""
    default: float
    """An operation of unknown time, for a byte of its result."""
    dear: float = math.inf
    """The same of one that is dear: by default it is not run again before it was timed."""

    def at(self, ratio: float) -> Costs:
        """Return the costs where tensors are compressed by `ratio`."""
        return replace(self, link=self.link / ratio)


CUDA_COSTS = Costs(
    link=1 / 55e9,
    shipping=1.5e-12,
    ship_floor=1.5e-4,
    replay_floor=2.5e-5,
    default=5e-13,
)
"""A PCIe 5 link, and a kernel each way that reads and writes once. Two copies of 16 MiB and their
launches take 60 microseconds, while the link would need 200 for them."""

CPU_COSTS = Costs(
    link=1 / 1.5e9,
    shipping=1 / 1.5e9,
    ship_floor=1.5e-4,
    replay_floor=2e-5,
    default=1 / 5e9,
)
"""The cores that train also copy and encode: nothing hides."""


class Choice(NamedTuple):
    """What was decided for each value, and what it comes to. Bytes and seconds of one step."""

    decisions: list[Decision]
    reasons: list[str]
    costs: list[float]
    """Seconds: of the replay where a value is made again, of the link where it is offloaded."""
    kept_bytes: int
    link_seconds: float
    """One way."""
    replay_seconds: float
    forward_seconds: float
    """What the link was taken to have."""
    host_seconds: float = 0.0
    """Of the training thread, where the step is bound by it."""


class _Way(NamedTuple):
    """How a value could be made again."""

    seconds: float
    made: Mapping[int, int]
    """The values that are made on the way, its own among them, with how deep that goes."""
    stored: frozenset[int]
    """Values on which that rests, and that nothing else would store."""
    depth: int


@dataclass(frozen=True)
class _Problem:
    values: Sequence[Value]
    seconds: Sequence[float]
    costs: Costs
    impossible: Mapping[int, str]
    room: int
    window: float
    in_flight: int
    """Bytes that may be on their way when the forward pass ends."""
    turn: float
    """Seconds from its end until something is asked for."""

    @property
    def saved(self) -> list[int]:
        return [value.number for value in self.values if value.is_saved]

    def ship_seconds(self, numbers: Iterable[int], rate: float) -> float:
        return sum(self.values[n].nbytes * rate + self.costs.ship_floor for n in numbers)

    def replay_seconds(self, numbers: Iterable[int]) -> float:
        return sum(max(self.seconds[n], self.costs.replay_floor) for n in numbers)

    def link_seconds(self, numbers: Iterable[int]) -> float:
        return sum(self.values[n].nbytes for n in numbers) * self.costs.link


class _Draft:
    """A way that is being looked for; what turns out to lead nowhere is taken back."""

    def __init__(self) -> None:
        self.looks = MOST_LOOKS
        self.seconds = 0.0
        self.made: dict[int, int] = {}
        self.stored: dict[int, None] = {}

    def mark(self) -> tuple[float, int, int]:
        return self.seconds, len(self.made), len(self.stored)

    def stored_since(self, mark: tuple[float, int, int]) -> list[int]:
        return list(islice(self.stored, mark[2], None))

    def back_to(self, mark: tuple[float, int, int]) -> None:
        self.seconds = mark[0]
        for added, count in ((self.made, mark[1]), (self.stored, mark[2])):
            while len(added) > count:
                added.popitem()


@dataclass
class _State:
    """What was decided so far."""

    problem: _Problem
    kept: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    stored_bytes: int = 0
    made: dict[int, int] = field(default_factory=dict)
    """Values that are made again, with how deep that goes."""
    last: set[int] = field(default_factory=set)
    """Values that stay since the link has no time for them before they are asked for. The budget
    has no room for them: they would be there, too, if they were on their way."""

    @property
    def room(self) -> int:
        """How many bytes more may stay."""
        return self.problem.room - self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """How many bytes stay because the budget has room."""
        return sum(self.problem.values[n].nbytes for n in self.kept)

    @property
    def link_seconds(self) -> float:
        """What the link needs one way."""
        return self.problem.link_seconds(self.stored)

    def spent(self, way: _Way, rate: float) -> float:
        """Return what a way costs, with all that has to be stored for it."""
        return way.seconds + self.problem.ship_seconds(way.stored, rate)

    def way(self, number: int, rate: float) -> _Way | None:
        """Return a cheap way to make a value again, storing at `rate`, or None."""
        draft = _Draft()
        depth = self._make(number, rate, draft, DEEPEST)
        if depth is None:
            return None
        return _Way(draft.seconds, draft.made, frozenset(draft.stored), depth)

    def store(self, number: int) -> None:
        if number not in self.stored:
            self.stored.add(number)
            self.stored_bytes += self.problem.values[number].nbytes

    def drop(self, number: int) -> None:
        if number in self.stored:
            self.stored.discard(number)
            self.stored_bytes -= self.problem.values[number].nbytes

    def take(self, way: _Way) -> None:
        self.made |= way.made
        for number in way.made:
            self.drop(number)
        for number in way.stored:
            self.store(number)

    def _make(self, number: int, rate: float, draft: _Draft, left: int) -> int | None:
        """Add to a draft how a value is made; return how deep that goes, or None."""
        problem, value = self.problem, self.problem.values[number]
        if not value.operation or number in problem.impossible:
            return None
        if left == 0 or draft.looks == 0 or math.isinf(problem.seconds[number]):
            return None
        draft.looks -= 1
        mark, depth = draft.mark(), 0
        draft.seconds += problem.replay_seconds({number})
        for source in set(value.inputs):
            found = self._have(source, rate, draft, left - 1)
            if found is None:
                draft.back_to(mark)
                return None
            depth = max(depth, found)
        if depth >= DEEPEST:
            draft.back_to(mark)
            return None
        draft.made[number] = depth + 1
        return depth + 1

    def _have(self, number: int, rate: float, draft: _Draft, left: int) -> int | None:
        """Add to a draft how an input is had: it is there, is made, or is stored besides."""
        if number < 0 or number in self.kept or number in self.last:
            return 0
        if number in self.stored or number in draft.stored:
            return 0
        known = self.made.get(number) or draft.made.get(number)
        if known is not None:
            return known
        mark = draft.mark()
        made = self._make(number, rate, draft, left)
        if not self.problem.values[number].is_result:
            return made
        if made is not None:
            more = draft.seconds - mark[0]
            more += self.problem.ship_seconds(draft.stored_since(mark), rate)
            if more <= self.problem.ship_seconds({number}, rate):
                return made
            draft.back_to(mark)
        draft.stored[number] = None
        return 0

    def let_go_of_what_is_not_needed(self) -> None:
        """Make and store only what a saved value is or rests on that does not stay."""
        stays = self.kept | self.last
        needed = {n for n in self.problem.saved if n not in stays}
        found = list(needed)
        while found:
            number = found.pop()
            if number in self.made:
                sources = {n for n in self.problem.values[number].inputs if n >= 0}
                sources -= needed | stays
                needed |= sources
                found += sources
        self.made = {n: depth for n, depth in self.made.items() if n in needed}
        self.stored = needed - self.made.keys()
        self.stored_bytes = sum(self.problem.values[n].nbytes for n in self.stored)

    def let_stay_what_is_asked_for_at_once(self) -> None:
        """Have what is saved last stay if it is needed before the link could have taken it.

        That is the last value that cannot be made again: it is not known how long those take that
        come before it.
        """
        problem, behind = self.problem, 0.0
        for value in reversed(problem.values):
            number = value.number
            if value.is_saved and (not value.operation or number in problem.impossible):
                needed = TURNAROUND * behind + problem.turn
                if problem.link_seconds({number}) > needed:
                    (self.kept if value.nbytes <= self.room else self.last).add(number)
                return
            behind += problem.seconds[number]

    def let_the_last_stay(self) -> None:
        """Have what was made last stay where the link would carry it after the forward pass."""
        problem, left = self.problem, self.problem.in_flight
        for number in sorted(self.stored, reverse=True):
            if self.link_seconds <= problem.window:
                return
            nbytes = problem.values[number].nbytes
            if nbytes > left:
                continue
            left -= nbytes
            self.drop(number)
            self.last.add(number)

    def total(self) -> float:
        """Return what the step pays for all of it."""
        problem, costs = self.problem, self.problem.costs
        return (
            problem.ship_seconds(self.stored, costs.shipping)
            + problem.replay_seconds(self.made)
            + max(0.0, self.link_seconds - problem.window)
        )


def choose(
    values: Sequence[Value],
    impossible: Mapping[int, str],
    costs: Costs,
    *,
    room: int = 0,
    forward_seconds: float | None = None,
    in_flight: int = 0,
    turn_seconds: float = math.inf,
) -> Choice:
    """Return what becomes of each value; `room` bytes may stay on the device.

    `impossible` has the values that cannot be made again, with the reason. `forward_seconds` is
    how long the forward pass takes; by default what its known operations take together. At its end
    `in_flight` bytes may be on their way, and `turn_seconds` later something is asked for.
    """
    seconds = operation_seconds(values, costs)
    window = sum(filter(math.isfinite, seconds)) if forward_seconds is None else forward_seconds
    problem = _Problem(values, seconds, costs, impossible, room, window, in_flight, turn_seconds)
    states = [
        _chosen(problem, costs.shipping + share * costs.link, gains)
        for share in (LINK_SHARES if len(values) < MANY_VALUES else LINK_SHARES[:1])
        for gains in ((None, _gains_alone, _gains_of_ways) if room else (None,))
    ]
    return _choice(min(states, key=_State.total))


def _chosen(
    problem: _Problem,
    rate: float,
    gains: Callable[[_Problem, float], dict[int, float]] | None,
) -> _State:
    """Return the choice where a byte that is shipped costs `rate`, and what stays is chosen first.

    By these `gains`; without them it is chosen at the end.
    """
    state = _State(problem)
    state.let_stay_what_is_asked_for_at_once()
    if gains is not None:
        _keep(state, gains(problem, rate))
    for number in problem.saved:
        if number in state.made or number in state.kept or number in state.last:
            continue
        way = state.way(number, rate)
        if way is not None and state.spent(way, rate) < problem.ship_seconds({number}, rate):
            state.take(way)
        else:
            state.store(number)
    _relieve_link(state)
    _keep(state, _gains_left(state, rate))
    state.let_go_of_what_is_not_needed()
    state.let_the_last_stay()
    return state


def operation_seconds(values: Sequence[Value], costs: Costs) -> list[float]:
    """Return what each value's operation takes: the least that was measured of one like it.

    Operations of identical blocks are alike, and a wait for the link falls into some of them. What
    a dear one takes that was not measured is not known.
    """
    least: dict[tuple[object, ...], float] = {}
    for value in values:
        if value.timed():
            key = _likeness(value, values)
            least[key] = min(least.get(key, value.seconds), value.seconds)
    return [least.get(_likeness(value, values), _default(value, costs)) for value in values]


def _default(value: Value, costs: Costs) -> float:
    if not value.operation:
        return 0.0
    return value.nbytes * (costs.dear if value.is_dear else costs.default)


def _likeness(value: Value, values: Sequence[Value]) -> tuple[object, ...]:
    inputs = (values[n].shape if n >= 0 else None for n in value.inputs)
    return (value.operation, value.shape, value.dtype, *inputs)


def _relieve_link(state: _State) -> None:
    """Make dearer values again while the link needs longer than the forward pass computes."""
    problem = state.problem
    candidates = []
    for number in sorted(state.stored, reverse=True):
        found = _relief(state, number)
        if found is not None:
            candidates.append((found[0], number))
    for _, number in sorted(candidates, reverse=True):
        if (state.stored_bytes - problem.in_flight) * problem.costs.link <= problem.window:
            return
        found = _relief(state, number) if number in state.stored else None
        if found is not None:
            state.take(found[1])


def _relief(state: _State, number: int) -> tuple[float, _Way] | None:
    """Return by how much more the link is relieved than making a stored value again takes."""
    problem = state.problem
    if not problem.values[number].is_saved:
        return None
    state.drop(number)
    way = state.way(number, problem.costs.link)
    state.store(number)
    if way is None:
        return None
    relief = problem.link_seconds({number}) - problem.link_seconds(way.stored)
    return (relief / way.seconds, way) if relief > way.seconds else None


def _keep(state: _State, gains: Mapping[int, float]) -> None:
    """Have values stay: those that save most for their bytes, of like ones what was saved last."""
    values, room = state.problem.values, state.room
    stays = state.kept | state.last

    def order(number: int) -> tuple[float, int]:
        return gains[number] / values[number].nbytes, number

    for number in sorted(gains.keys() - stays, key=order, reverse=True):
        if values[number].nbytes <= room:
            room -= values[number].nbytes
            state.kept.add(number)


def _gains_alone(problem: _Problem, rate: float) -> dict[int, float]:
    """Return what each saved value costs unless it stays, where its inputs are at hand."""
    gains = {}
    for number in problem.saved:
        gains[number] = problem.ship_seconds({number}, rate)
        if problem.values[number].operation and number not in problem.impossible:
            gains[number] = min(gains[number], problem.replay_seconds({number}))
    return gains


def _gains_of_ways(problem: _Problem, rate: float) -> dict[int, float]:
    """Return what each saved value costs unless it stays, where all others are at hand."""
    gains = {}
    others = _State(problem)
    for number in problem.saved:
        others.store(number)
    for number in problem.saved:
        others.drop(number)
        way = others.way(number, rate)
        others.store(number)
        shipping = problem.ship_seconds({number}, rate)
        gains[number] = shipping if way is None else min(shipping, others.spent(way, rate))
    return gains


def _gains_left(state: _State, rate: float) -> dict[int, float]:
    """Return what each saved value costs as it has been decided."""
    problem = state.problem
    return {
        number: problem.replay_seconds({number})
        if number in state.made
        else problem.ship_seconds({number}, rate)
        for number in problem.saved
        if number not in state.kept
    }


def _choice(state: _State) -> Choice:
    problem = state.problem
    decisions: list[Decision] = []
    reasons: list[str] = []
    costs: list[float] = []
    for value in problem.values:
        number, link = value.number, problem.link_seconds({value.number})
        if number in state.kept:
            decided: tuple[Decision, str, float] = Keep("budget"), "the budget has room", 0.0
        elif number in state.last:
            decided = LAST, "asked for before the link would have taken it", 0.0
        elif number in state.made:
            decided = REPLAY, "made again sooner than shipped", problem.seconds[number]
        elif number in state.stored and value.is_saved:
            reason = problem.impossible.get(number) or _why_stored(value)
            decided = OFFLOAD, reason, link
        elif number in state.stored:
            decided = OFFLOAD, "others are made again from it", link
        else:
            decided = OFFLOAD, "not saved", 0.0
        decisions.append(decided[0])
        reasons.append(decided[1])
        costs.append(decided[2])
    return Choice(
        decisions,
        reasons,
        costs,
        kept_bytes=state.kept_bytes,
        link_seconds=state.link_seconds,
        replay_seconds=sum(problem.seconds[n] for n in state.made),
        forward_seconds=problem.window,
    )


def _why_stored(value: Value) -> str:
    if not value.operation:
        return "no operation is known that makes it again"
    return "the link has time for it" if value.is_dear else "shipped sooner than made again"
