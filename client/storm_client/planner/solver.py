"""Decides which values of a step are kept, offloaded and recomputed.

A value that is not kept has one of two costs. An offloaded byte takes time on the link, which is
free while computation hides it, and some time of the processor that encodes and decodes it. A
recomputed value takes the time of its operation, in the backward pass.

1. A value that is needed before the link could have offloaded it is kept, if it cannot be
   recomputed or the backward pass begins with it: anything else would free nothing. Examples are
   the softmax output of a loss and other values that a loss makes of logits, the largest tensors
   of many models.
2. Values fall into groups: no value of one is recomputed from a recomputable value of another.
   Mostly the groups are the blocks of a model. Given prices of a kept byte and of a byte on the
   link, the best choice for a group is a minimum cut (`min_cut.py`). Identical groups share it.
3. Several prices give each group several choices. `selection.py` selects those that fit into the
   budget and cost least together: some blocks keep more than others, some use the link more.
4. The rest of the budget keeps values that were to be offloaded or recomputed.
5. If the link still needs longer than the forward pass, the last saved values are kept, up to the
   in-flight limit: they are needed first, before the link would have offloaded them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from storm_client.planner.decisions import LAST, OFFLOAD, REPLAY, Decision, Keep, Replay
from storm_client.planner.groups import Alike, Choices, GroupChoice, identical_groups
from storm_client.planner.machine import Machine
from storm_client.planner.min_cut import Node
from storm_client.planner.prices import Priced, operation_seconds
from storm_client.planner.problem import Problem, Value
from storm_client.planner.selection import choices

__all__ = ["Choice", "Solver", "choose"]

TURNAROUND = 3.0
"""Seconds from the making of a value to its use in the backward pass, for each second that the
forward pass computes after it: that second, and two of the backward pass."""


class Choice(NamedTuple):
    """The decision for each value, and the totals. Bytes and seconds are of one step."""

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
    """Time that the link was assumed to have."""
    seconds: float
    """Time that the choice adds to a step."""

    def of(self, numbers: Sequence[int]) -> Choice:
        """Return the same choice for some of the values, renumbered."""
        return self._replace(
            decisions=[self.decisions[number] for number in numbers],
            reasons=[self.reasons[number] for number in numbers],
            costs=[self.costs[number] for number in numbers],
        )


def choose(problem: Problem, machine: Machine, *, budget_bytes: int = 0) -> Choice:
    """Return the decision for each value of a step if `budget_bytes` of them may be kept.

    If the forward pass was not timed, the link has the total time of its known operations.
    """
    return Solver(problem, machine).choose(budget_bytes)


class Solver:
    """Makes choices for one step and machine, with any number of budgets."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        seconds = operation_seconds(problem.values, machine)
        window = problem.forward_seconds
        if window is None:
            window = sum(filter(math.isfinite, seconds))
        self._priced = Priced(problem, machine, seconds, window)
        self._alike: dict[frozenset[int], list[Alike]] = {}
        """The groups of values, for each set of values that are present anyway."""
        self._known: dict[tuple[Node, ...], Choices] = {}
        """The known choices for each group of nodes."""

    def choose(self, budget_bytes: int, kept: Set[int] = frozenset()) -> Choice:
        """Return the decision for each value if `budget_bytes` may be kept, as `choose` does.

        Values in `kept` are kept in any case, and count toward the budget.
        """
        priced = self._priced
        begun = _State(priced, budget_bytes, kept=set(kept))
        begun.keep_needed_at_once()
        present = frozenset(begun.kept | begun.last)
        if present not in self._alike:
            self._alike[present] = identical_groups(priced, present, self._known)
        found = choices(priced, self._alike[present], begun.budget_left)
        return _choice(min(map(begun.with_group_choices, found), key=_State.total))

    def with_kept(self, choice: Choice, more: Iterable[int]) -> Choice:
        """Return the choice that also keeps `more`, with all other decisions unchanged."""
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
    """The decisions so far."""

    priced: Priced
    budget_bytes: int
    """Bytes that may be kept in all."""
    kept: set[int] = field(default_factory=set)
    """Values that the budget keeps."""
    last: set[int] = field(default_factory=set)
    """Values that are kept beside the budget, since they are needed before the link has time for
    them. In flight they would be on the device, too."""
    stored: set[int] = field(default_factory=set)
    recomputed: set[int] = field(default_factory=set)

    @property
    def budget_left(self) -> int:
        """How many more bytes may be kept."""
        return max(0, self.budget_bytes - self.kept_bytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the budget keeps."""
        return sum(self.priced.nbytes[n] for n in self.kept)

    @property
    def link_seconds(self) -> float:
        """Link time in one direction."""
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

    def keep_needed_at_once(self) -> None:
        """Keep values that are needed before the link could have offloaded them.

        Candidates are the values that the backward pass begins with, which would occupy memory
        anyway, and the last value that cannot be recomputed. Earlier values are not: the time
        between their making and their use is unknown.
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

    def with_group_choices(self, chosen: Sequence[GroupChoice]) -> _State:
        """Return the decisions if groups of values take these choices."""
        state = replace(
            self,
            kept=self.kept.union(*(choice.kept for choice in chosen)),
            last=set(self.last),
            stored=set().union(*(choice.stored for choice in chosen)),
            recomputed=set().union(*(choice.recomputed for choice in chosen)),
        )
        state.keep_what_fits()
        state.drop_what_is_not_needed()
        state.store_what_fits()
        state.drop_what_is_not_needed()
        state.keep_the_last()
        return state

    def keep_what_fits(self) -> None:
        """Keep values that cost time: most per byte first, of equal ones the last."""
        priced, left = self.priced, self.budget_left
        storing = priced.store_seconds(priced.machine.link)

        def order(number: int) -> tuple[float, int]:
            seconds = priced.recompute_seconds if number in self.recomputed else storing
            return seconds[number] / priced.nbytes[number], number

        costly = self.stored.union(priced.saved) - self.kept - self.last
        for number in sorted(costly, key=order, reverse=True):
            if priced.nbytes[number] <= left:
                left -= priced.nbytes[number]
                self.kept.add(number)

    def store_what_fits(self) -> None:
        """Store values that are expensive to recompute while the link has time for them."""
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
        """Keep, recompute and store only saved values and inputs of recomputations."""
        kept_anyway = self.kept | self.last
        needed = set(self.priced.saved)
        found = list(needed)
        while found:
            number = found.pop()
            if number in self.recomputed and number not in kept_anyway:
                sources = self.priced.sources[number]
                more = [n for n in sources if n >= 0 and n not in needed]
                needed.update(more)
                found += more
        self.kept &= needed
        self.last &= needed
        needed -= kept_anyway
        self.recomputed &= needed
        self.stored = needed - self.recomputed

    def keep_the_last(self) -> None:
        """Keep the last saved values if the link would offload them after the forward pass."""
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
    """Return the decision for a value, the reason, and the seconds that it costs."""
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
