"""Chooses what of a step is kept, offloaded and recomputed.

What is not kept costs one of two things. An offloaded byte takes time on the link, which is free
while computing hides it, and a little of the processor that encodes and decodes it. A recomputed
byte takes the time of its operation, in the backward pass.

1. What is asked for before the link could have offloaded it is kept, if it cannot be recomputed or
   the backward pass begins with it: else would free nothing. The output of a loss' softmax is that,
   and what a loss makes of logits, the largest tensors of many models.
2. Values fall into groups of which none is recomputed from what may be recomputed of another: the
   blocks of a model, mostly. With a price for a byte that is kept and one for a byte on the link
   the best choice for a group is a minimum cut (`min_cut.py`). Groups that are alike share it.
3. Several prices give each group several choices. Of these are taken what fits into the budget and
   costs least together (`exchange.py`): some blocks keep more than others, some use the link more.
4. What is left of the budget keeps what was to be offloaded or recomputed after all.
5. If the link still needs longer than the forward pass, what was saved last is kept, up to the
   in-flight limit: it is asked for first, before the link would have offloaded it.

Everything here is pure: no tensor, device or clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from storm_client.planner.decisions import LAST, OFFLOAD, REPLAY, Decision, Keep, Replay
from storm_client.planner.exchange import choices
from storm_client.planner.groups import Alike, Choices, Part, alike_groups
from storm_client.planner.machine import Machine
from storm_client.planner.min_cut import Node
from storm_client.planner.prices import Priced, operation_seconds
from storm_client.planner.problem import Problem, Value

__all__ = ["Choice", "Solver", "choose"]

TURNAROUND = 3.0
"""Seconds from the making of a value to its use in the backward pass, for each that the forward
pass computes behind it: that second, and two of the backward pass."""


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
    seconds: float
    """That a step takes longer."""

    def of(self, numbers: Sequence[int]) -> Choice:
        """Return the same of some values alone, which are numbered anew."""
        return self._replace(
            decisions=[self.decisions[number] for number in numbers],
            reasons=[self.reasons[number] for number in numbers],
            costs=[self.costs[number] for number in numbers],
        )


def choose(problem: Problem, machine: Machine, *, budget_bytes: int = 0) -> Choice:
    """Return what becomes of each value of a step if `budget_bytes` of them may be kept.

    Where the forward pass was not timed, the link has what its known operations take together.
    """
    return Solver(problem, machine).choose(budget_bytes)


class Solver:
    """Chooses for one step and machine, by any number of budgets."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        """Look at what each value costs."""
        seconds = operation_seconds(problem.values, machine)
        window = problem.forward_seconds
        if window is None:
            window = sum(filter(math.isfinite, seconds))
        self._priced = Priced(problem, machine, seconds, window)
        self._alike: dict[frozenset[int], list[Alike]] = {}
        """The groups of values, by what is there anyway."""
        self._known: dict[tuple[Node, ...], Choices] = {}
        """What is known of the choices of such a group."""

    def choose(self, budget_bytes: int, stays: Set[int] = frozenset()) -> Choice:
        """Return what becomes of each value if `budget_bytes` may be kept, as by `choose`.

        What `stays` is kept in any case, and is of the budget.
        """
        priced = self._priced
        begun = _State(priced, budget_bytes, kept=set(stays))
        begun.keep_what_is_asked_for_at_once()
        there = frozenset(begun.kept | begun.last)
        if there not in self._alike:
            self._alike[there] = alike_groups(priced, there, self._known)
        found = choices(priced, self._alike[there], begun.budget_left)
        return _choice(min(map(begun.taking, found), key=_State.total))

    def keeping(self, choice: Choice, more: Iterable[int]) -> Choice:
        """Return what becomes of each value if `more` is kept, and all else is decided alike."""
        state = _State(self._priced, choice.kept_bytes)
        for number, decision in enumerate(choice.decisions):
            if isinstance(decision, Replay):
                state.recomputed.add(number)
            elif decision == LAST:
                state.last.add(number)
            elif isinstance(decision, Keep):
                state.kept.add(number)
        state.kept.update(more)
        state.last.difference_update(more)
        state.drop_what_is_not_needed()
        return _choice(state)


@dataclass
class _State:
    """What was decided so far."""

    priced: Priced
    budget_bytes: int
    """What may be kept in all."""
    kept: set[int] = field(default_factory=set)
    """Values that the budget keeps."""
    last: set[int] = field(default_factory=set)
    """Values that are kept beside the budget, since the link has no time for them before they are
    asked for. In flight they would be on the device, too."""
    stored: set[int] = field(default_factory=set)
    recomputed: set[int] = field(default_factory=set)

    @property
    def budget_left(self) -> int:
        """How many bytes more may be kept."""
        return max(0, self.budget_bytes - self.kept_bytes)

    @property
    def kept_bytes(self) -> int:
        """How many bytes the budget keeps."""
        return sum(self.priced.nbytes[n] for n in self.kept)

    @property
    def link_seconds(self) -> float:
        """What the link needs one way."""
        return self.priced.link_seconds(self.stored)

    def total(self) -> float:
        """Return the seconds that the choice adds to the step."""
        priced = self.priced
        storing, recomputing = priced.store_seconds(priced.machine.codec), priced.recompute_seconds
        return (
            sum(storing[number] for number in self.stored)
            + sum(recomputing[number] for number in self.recomputed)
            + max(0.0, self.link_seconds - priced.window)
        )

    # --- steps of a choice ------------------------------------------------------------------

    def keep_what_is_asked_for_at_once(self) -> None:
        """Keep what is needed before the link could have offloaded it.

        That is looked at of what the backward pass begins with, which would lie there all the same,
        and of the last value that cannot be recomputed: it is not known how long those take that
        come before it.
        """
        priced, behind = self.priced, 0.0
        begin = len(priced.values)
        for value in reversed(priced.values):
            number = value.number
            begins, _ = priced.problem.used_between.get(number, (-1, -1))
            is_fixed = value.is_saved and not priced.problem.may_recompute(value)
            if is_fixed or begins == begin:
                needed = TURNAROUND * behind + priced.problem.turn_seconds
                if number not in self.kept and priced.link_seconds([number]) > needed:
                    fits = is_fixed and value.nbytes <= self.budget_left
                    (self.kept if fits else self.last).add(number)
            if is_fixed:
                return
            behind += priced.seconds[number]

    def taking(self, parts: Sequence[Part]) -> _State:
        """Return what is decided if groups of values take these choices."""
        state = replace(
            self,
            kept=self.kept.union(*(part.kept for part in parts)),
            last=set(self.last),
            stored=set().union(*(part.stored for part in parts)),
            recomputed=set().union(*(part.recomputed for part in parts)),
        )
        state.keep_what_fits()
        state.drop_what_is_not_needed()
        state.store_what_fits()
        state.drop_what_is_not_needed()
        state.keep_the_last()
        return state

    def keep_what_fits(self) -> None:
        """Keep of what costs time what costs most for its bytes, of like values the last."""
        priced, left = self.priced, self.budget_left
        storing = priced.store_seconds(priced.machine.link)

        def order(number: int) -> tuple[float, int]:
            seconds = priced.recompute_seconds if number in self.recomputed else storing
            return seconds[number] / priced.nbytes[number], number

        stays = self.kept | self.last
        for number in sorted(set(priced.saved) - stays, key=order, reverse=True):
            if priced.nbytes[number] <= left:
                left -= priced.nbytes[number]
                self.kept.add(number)

    def store_what_fits(self) -> None:
        """Store what is dear to recompute while the link has time for it."""
        priced, link = self.priced, self.link_seconds
        spared = priced.window + priced.problem.last_bytes * priced.machine.link
        storing, recomputing = priced.store_seconds(priced.machine.codec), priced.recompute_seconds

        def order(number: int) -> tuple[float, int]:
            return (recomputing[number] - storing[number]) / priced.nbytes[number], number

        for number in sorted(self.recomputed.intersection(priced.saved), key=order, reverse=True):
            taken = priced.link_seconds([number])
            if recomputing[number] > storing[number] and link + taken <= spared:
                link += taken
                self.recomputed.discard(number)
                self.stored.add(number)

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
        self.recomputed &= needed
        self.stored = needed - self.recomputed

    def keep_the_last(self) -> None:
        """Keep what was saved last where the link would carry it after the forward pass."""
        priced, left = self.priced, self.priced.problem.last_bytes
        link = self.link_seconds
        for number in sorted(self.stored, reverse=True):
            if link <= priced.window:
                return
            nbytes = priced.nbytes[number]
            if nbytes > left:
                continue
            left -= nbytes
            link -= priced.link_seconds([number])
            self.stored.discard(number)
            self.last.add(number)


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
        seconds=state.total(),
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
