"""Chooses what is kept, offloaded and made again in a kind of step, from what the parts cost.

What a step gives up it pays for in one of two ways. An offloaded byte takes time on the link, which
is free while computing hides it, and a little of the processor, which encodes and decodes it. A
byte that is made again takes the time of its operation, in the backward pass. So:

1. What is made again for less than the processor's share of shipping it is made again.
2. As long as the forward pass computes for less time than its link needs, dearer values are made
   again, those first that relieve the link most for their time.
3. What the budget lets stay then stays, again what saves most time for its bytes first.

This is the greedy solution of a fractional knapsack. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from storm_client.plan.decisions import OFFLOAD, REPLAY, Decision, Keep, Replay
from storm_client.plan.kinds import Value

__all__ = ["CPU_COSTS", "CUDA_COSTS", "Choice", "Costs", "choose", "operation_seconds"]

DEEPEST = 16
"""Operations in a row that make a value again from what is stored."""


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
    link=1 / 55e9, shipping=1.5e-12, ship_floor=1.5e-4, replay_floor=2.5e-5, default=5e-13
)
"""A PCIe 5 link, and a kernel each way that reads and writes once."""

CPU_COSTS = Costs(
    link=1 / 1.5e9, shipping=1 / 1.5e9, ship_floor=1.5e-4, replay_floor=2e-5, default=1 / 5e9
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


class _Way(NamedTuple):
    """How a value could be made again."""

    seconds: float
    made: frozenset[int]
    """The values that are made on the way, its own among them."""
    stored: frozenset[int]
    """Values on which that rests, and that nothing else would store."""
    depth: int


@dataclass
class _State:
    values: Sequence[Value]
    seconds: Sequence[float]
    costs: Costs
    impossible: Mapping[int, str]
    stored: set[int] = field(default_factory=set)
    made: dict[int, int] = field(default_factory=dict)
    """Values that are made again, with how deep that goes."""
    dear: set[int] = field(default_factory=set)

    def ship_seconds(self, numbers: Set[int], rate: float) -> float:
        return sum(self.values[n].nbytes * rate + self.costs.ship_floor for n in numbers)

    def spent(self, way: _Way, rate: float) -> float:
        """Return what a way costs, with all that has to be stored for it."""
        return way.seconds + self.ship_seconds(way.stored, rate)

    def way(self, number: int, rate: float, *, dear: bool) -> _Way | None:
        """Return the cheapest way to make a value again, storing at `rate`, or None."""
        value = self.values[number]
        if not value.operation or number in self.impossible or (value.is_dear and not dear):
            return None
        if math.isinf(self.seconds[number]):
            return None
        seconds = max(self.seconds[number], self.costs.replay_floor)
        made, stored, depth = {number}, set[int](), 0
        for source in set(value.inputs):
            if source < 0 or source in self.stored or source in made or source in stored:
                continue
            if source in self.made:
                depth = max(depth, self.made[source])
                continue
            step = self._source(source, rate, dear=dear)
            if step is None:
                return None
            seconds += step.seconds
            made |= step.made
            stored |= step.stored
            depth = max(depth, step.depth)
        if depth >= DEEPEST:
            return None
        return _Way(seconds, frozenset(made), frozenset(stored), depth + 1)

    def _source(self, number: int, rate: float, *, dear: bool) -> _Way | None:
        """Return how an input that autograd has not saved can be had: made, or stored besides."""
        made = self.way(number, rate, dear=dear)
        if not self.values[number].is_result:
            return made
        besides = _Way(0.0, frozenset(), frozenset({number}), 0)
        if made is None:
            return besides
        return made if self.spent(made, rate) <= self.spent(besides, rate) else besides

    def take(self, way: _Way) -> None:
        for number in way.made:
            self.stored.discard(number)
            self.made[number] = way.depth
        self.stored |= way.stored


def choose(
    values: Sequence[Value],
    impossible: Mapping[int, str],
    costs: Costs,
    *,
    room: int = 0,
    forward_seconds: float | None = None,
) -> Choice:
    """Return what becomes of each value; `room` bytes may stay on the device.

    `impossible` has the values that cannot be made again, with the reason. `forward_seconds` is
    how long the forward pass takes; by default what its known operations take together.
    """
    seconds = operation_seconds(values, costs)
    state = _State(values, seconds, costs, impossible)
    window = sum(filter(math.isfinite, seconds)) if forward_seconds is None else forward_seconds
    saved = [value.number for value in values if value.is_saved]
    for number in saved:
        if number in state.made:
            continue
        way = state.way(number, costs.shipping, dear=False)
        shipping = state.ship_seconds({number}, costs.shipping)
        if way is not None and state.spent(way, costs.shipping) < shipping:
            state.take(way)
        else:
            state.stored.add(number)
    _relieve_link(state, window)
    kept = _keep(state, room, window)
    return _choice(state, kept, window)


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


def _exposed(state: _State, window: float) -> float:
    """Return for how long the forward pass would wait for the link."""
    return sum(state.values[n].nbytes for n in state.stored) * state.costs.link - window


def _relieve_link(state: _State, window: float) -> None:
    """Make dearer values again while the link needs longer than the forward pass computes."""
    candidates = []
    for number in sorted(state.stored, reverse=True):
        found = _relief(state, number)
        if found is not None:
            candidates.append((found[0], number))
    for _, number in sorted(candidates, reverse=True):
        if _exposed(state, window) <= 0:
            return
        found = _relief(state, number) if number in state.stored else None
        if found is not None:
            state.take(found[1])


def _relief(state: _State, number: int) -> tuple[float, _Way] | None:
    """Return by how much more the link is relieved than making a stored value again takes."""
    value, rate = state.values[number], state.costs.link
    if not value.is_saved:
        return None
    state.stored.discard(number)
    way = state.way(number, rate, dear=True)
    state.stored.add(number)
    if way is None:
        return None
    relief = (value.nbytes - sum(state.values[n].nbytes for n in way.stored)) * rate
    return (relief / way.seconds, way) if relief > way.seconds else None


def _keep(state: _State, room: int, window: float) -> set[int]:
    """Return what stays: what saves most for its bytes, what was saved last first."""
    kept: set[int] = set()
    exposed = _exposed(state, window)
    rate = state.costs.link if exposed > 0 else state.costs.shipping

    def gain(number: int) -> float:
        value = state.values[number]
        if number in state.made:
            return max(state.seconds[number], state.costs.replay_floor) / value.nbytes
        return rate + state.costs.ship_floor / value.nbytes

    wanted = [n for n in (*state.stored, *state.made) if state.values[n].is_saved]
    for number in sorted(wanted, key=lambda n: (gain(n), n), reverse=True):
        nbytes = state.values[number].nbytes
        if nbytes <= room:
            room -= nbytes
            kept.add(number)
    return kept


def _choice(state: _State, kept: set[int], window: float) -> Choice:
    decisions: list[Decision] = []
    reasons: list[str] = []
    costs: list[float] = []
    for value in state.values:
        number, link = value.number, value.nbytes * state.costs.link
        if number in kept:
            decided: tuple[Decision, str, float] = Keep("budget"), "the budget has room", 0.0
        elif number in state.made:
            seconds = state.seconds[number]
            decided = REPLAY, "made again sooner than shipped", seconds
        elif number in state.stored and value.is_saved:
            reason = state.impossible.get(number) or _why_stored(value)
            decided = OFFLOAD, reason, link
        elif number in state.stored:
            decided = OFFLOAD, "others are made again from it", link
        else:
            decided = OFFLOAD, "not saved", 0.0
        decisions.append(decided[0])
        reasons.append(decided[1])
        costs.append(decided[2])
    given_up = state.stored - kept
    return Choice(
        decisions,
        reasons,
        costs,
        kept_bytes=sum(state.values[n].nbytes for n in kept),
        link_seconds=sum(state.values[n].nbytes for n in given_up) * state.costs.link,
        replay_seconds=sum(
            cost
            for decision, cost in zip(decisions, costs, strict=True)
            if isinstance(decision, Replay)
        ),
        forward_seconds=window,
    )


def _why_stored(value: Value) -> str:
    if not value.operation:
        return "no operation is known that makes it again"
    return "the link has time for it" if value.is_dear else "shipped sooner than made again"
