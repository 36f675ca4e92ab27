"""Compares the plans of one step signature: steps follow one after another until one is chosen.

`planner.search` decides which plan comes next. All plans are made from the same figures, so that
the chosen plan is the one that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from storm_client.planner.alternatives import choose_alternative, kept_bytes
from storm_client.planner.decisions import Decision
from storm_client.planner.link_watch import has_changed
from storm_client.planner.machine import Machine
from storm_client.planner.search import (
    Alternative,
    PlanSearch,
)

if TYPE_CHECKING:
    from storm_client.eager.step_times import StepTimes
    from storm_client.planner.problem import Problem
    from storm_client.planner.solver import Choice

__all__ = ["Comparison"]


class Comparison:
    """The decisions of the compared plans, and the figures from which all of them are made."""

    def __init__(self, search: PlanSearch, machine: Machine | None = None) -> None:
        """Have steps follow the plans in the order of `search`."""
        self.search = search
        self.machine = machine
        """The figures from which all plans are made; None until the first plan is made."""
        self.decisions: dict[Alternative, list[Decision]] = {}
        self._kept_bytes: dict[Alternative, int] = {}
        """Bytes that each plan keeps on the device."""
        self._asked: tuple[Problem, Machine, int | None] | None = None
        """What the plans in `_choices` were made from."""
        self._choices: dict[Alternative, Choice] = {}
        """The plans as made: each may be followed several times."""
        self._turn = math.inf
        self.followed: Alternative | None = None
        """The alternative that steps follow now; ranks follow a decision only some steps later."""
        self.is_reported = False
        """Whether the result has been reported to the user."""

    def start_again(self, machine: Machine) -> None:
        """Have all plans made anew from other figures, and measured again."""
        faster = 1.0 if self.machine is None else self.machine.link / machine.link
        self.machine, self.is_reported = machine, False
        self.decisions.clear()
        self._kept_bytes.clear()
        self.search.start_again(faster)

    def is_for_another_link(self, machine: Machine) -> bool:
        """Return whether the chosen plan was made for a link of another speed than `machine`'s."""
        if self.machine is None or not self.search.is_settled:
            return False
        return has_changed(self.machine.link, machine.link)

    @property
    def wants_turn(self) -> bool:
        """Whether the turn time is not known yet."""
        return math.isinf(self._turn)

    def turn_seconds(self, times: StepTimes) -> float:
        """Return the turn time for all plans: the first that is known.

        The turn differs from step to step. With another value the plan that is followed in the end
        would not be the one that was measured, and its recomputation would have to be verified
        again.
        """
        if self.wants_turn:
            self._turn = times.turn_seconds()
        return self._turn

    def record_times(self, times: StepTimes) -> bool:
        """Record the times of the latest steps; return whether to follow another plan."""
        follows_another = False
        for alternative, seconds in times.known_steps():
            follows_another |= self.search.record_step(alternative, seconds)
        return follows_another

    def choose(self, problem: Problem, machine: Machine, room: int | None) -> Choice:
        """Return the choice to follow next: that of the first plan that has to be measured.

        `room` is the number of bytes that may be kept; None means as few as possible.
        """
        search = self.search
        while True:
            choice = self._choice(search.current, problem, machine, room)
            if search.is_settled or search.is_remeasuring:
                break
            like = self.measured_like(choice.decisions)
            if like is not None:
                search.reuse_result_of(like)
            elif not search.skip_if_slow(choice.link_seconds):
                break
        self.record_decisions(problem, choice)
        return choice

    def choose_several(
        self, problem: Problem, machine: Machine, room: int | None
    ) -> list[tuple[Alternative, Choice]]:
        """Return the same, and the choices to follow next whatever time its steps take.

        Of plans with the same decisions only the first is included.
        """
        search, choice = self.search, self.choose(problem, machine, room)
        found = [(search.current, choice)]
        for alternative in search.upcoming():
            choice = self._choice(alternative, problem, machine, room)
            others = [other.decisions for _, other in found]
            like = None if search.is_remeasuring else self.measured_like(choice.decisions)
            if like or choice.decisions in others or search.is_too_slow(choice.link_seconds):
                continue
            found.append((alternative, choice))
            self._record(alternative, problem, choice)
        return found

    def _choice(
        self, alternative: Alternative, problem: Problem, machine: Machine, room: int | None
    ) -> Choice:
        """Return the choice of an alternative, made once: that may take longer than a step."""
        asked = problem, machine, room
        if self._asked != asked:
            self._asked = asked
            self._choices.clear()
        if alternative not in self._choices:
            self._choices[alternative] = choose_alternative(
                alternative, problem, machine, room=room
            )
        return self._choices[alternative]

    def record_decisions(self, problem: Problem, choice: Choice) -> None:
        """Record the decisions of the current plan."""
        self.search.record_kept_bytes(self._record(self.search.current, problem, choice))

    def _record(self, alternative: Alternative, problem: Problem, choice: Choice) -> int:
        """Record the decisions of a plan; return the bytes that it keeps on the device."""
        self.decisions[alternative] = choice.decisions
        nbytes = self._kept_bytes[alternative] = kept_bytes(problem, choice)
        return nbytes

    def record_turns(
        self, followed: Sequence[Alternative], steps: Sequence[Sequence[float | None]]
    ) -> None:
        """Record the times of the steps that followed some plans one after another."""
        self.search.record_turns(
            (one, self._kept_bytes[one], seconds)
            for one, seconds in zip(followed, steps, strict=False)
            if one in self._kept_bytes
        )

    def measured_like(self, decisions: list[Decision]) -> Alternative | None:
        """Return a measured plan with the same decisions; None if there is none."""
        for alternative, others in self.decisions.items():
            if alternative in self.search.results and others == decisions:
                return alternative
        return None

    def line(self) -> str | None:
        """Return the result of the comparison, once, as soon as steps follow the chosen plan."""
        search = self.search
        if self.is_reported or not search.is_settled or self.followed != search.current:
            return None
        self.is_reported = True
        return f"stormd: of the plans that steps have followed: {self.search}"
