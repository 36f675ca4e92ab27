"""The plans of one step signature that its steps follow one after another, until the best stays.

Which comes next says `planner.search`. All are made from the same figures, so that the plan that
stays is the one that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from storm_client.planner.alternatives import choose_alternative, staying_bytes
from storm_client.planner.decisions import Decision
from storm_client.planner.in_flight import device_bytes
from storm_client.planner.link_watch import has_changed
from storm_client.planner.machine import Machine
from storm_client.planner.search import (
    ALL_STAYS,
    AS_BLOCKS,
    OFFLOAD_ALONE,
    Alternative,
    PlanSearch,
)

if TYPE_CHECKING:
    from storm_client.eager.signature import StepSignature
    from storm_client.eager.step_times import StepTimes
    from storm_client.planner.problem import Problem
    from storm_client.planner.solver import Choice

__all__ = ["Comparison", "search_for"]

LITTLE: Final = 1 / 128
"""Of a device's memory: to free less is not worth a step that the thread makes longer."""


class Comparison:
    """What the plans decide that are compared, and what all of them are made from."""

    def __init__(self, search: PlanSearch, machine: Machine | None = None) -> None:
        """Have steps follow what `search` says."""
        self.search = search
        self.machine = machine
        """The figures that all are made from; None until the first is made."""
        self.decided: dict[Alternative, list[Decision]] = {}
        self._staying: dict[Alternative, int] = {}
        """Bytes of what each of them has stay on the device."""
        self._turn = math.inf
        self.followed: Alternative | None = None
        """What steps follow by now; ranks follow what they have decided some steps later."""
        self.is_told = False
        """Whether somebody has said what it came to."""

    def start_again(self, machine: Machine) -> None:
        """Have all plans be made anew, from other figures, and be measured."""
        faster = 1.0 if self.machine is None else self.machine.link / machine.link
        self.machine, self.is_told = machine, False
        self.decided.clear()
        self._staying.clear()
        self.search.start_again(faster)

    def is_for_another_link(self, machine: Machine) -> bool:
        """Tell whether a plan has been chosen for a link that is not that of some figures."""
        if self.machine is None or not self.search.is_settled:
            return False
        return has_changed(self.machine.link, machine.link)

    def turn_seconds(self, times: StepTimes) -> float:
        """Return what plans are told of the turn: the first time that is known.

        It differs from step to step, and the plan that is followed in the end would not be the one
        that was measured: its replays would have to prove themselves once more.
        """
        if math.isinf(self._turn):
            self._turn = times.turn_seconds()
        return self._turn

    def took(self, times: StepTimes) -> bool:
        """Note what the latest steps took; tell whether another plan is to be followed."""
        goes_on = False
        for alternative, seconds in times.known_steps():
            goes_on |= self.search.took(alternative, seconds)
        return goes_on

    def choose(self, problem: Problem, machine: Machine, room: int | None) -> Choice:
        """Return the choice that is followed next, by the first plan that has to be measured.

        `room` is how many bytes may be kept; None where as few as possible are to.
        """
        search = self.search
        while True:
            choice = choose_alternative(search.current, problem, machine, room=room)
            if search.is_settled or search.looks_again:
                break
            like = self.measured_like(choice.decisions)
            if like is not None:
                search.is_like(like)
            elif not search.rules_out(choice.link_seconds):
                break
        self.follows(problem, choice)
        return choice

    def choose_several(
        self, problem: Problem, machine: Machine, room: int | None
    ) -> list[tuple[Alternative, Choice]]:
        """Return the same, and what may be followed behind it before it is known what that takes.

        Of plans that decide the same the first is among them.
        """
        search, choice = self.search, self.choose(problem, machine, room)
        found = [(search.current, choice)]
        for alternative in search.coming():
            choice = choose_alternative(alternative, problem, machine, room=room)
            others = [other.decisions for _, other in found]
            if not search.looks_again:
                others += [self.decided[other] for other in search.results]
            if choice.decisions in others or search.is_too_slow(choice.link_seconds):
                continue
            found.append((alternative, choice))
            self._decides(alternative, problem, choice)
        return found

    def follows(self, problem: Problem, choice: Choice) -> None:
        """Note what the current plan decides."""
        self.search.follows(self._decides(self.search.current, problem, choice))

    def _decides(self, alternative: Alternative, problem: Problem, choice: Choice) -> int:
        """Note what a plan decides; return the bytes that stay by it."""
        self.decided[alternative] = choice.decisions
        staying = self._staying[alternative] = staying_bytes(problem, choice)
        return staying

    def took_in_turn(
        self, followed: Sequence[Alternative], steps: Sequence[Sequence[float | None]]
    ) -> None:
        """Note what the steps took that have followed some plans one after another."""
        self.search.took_in_turn(
            (one, self._staying[one], seconds)
            for one, seconds in zip(followed, steps, strict=False)
            if one in self._staying
        )

    def measured_like(self, decisions: list[Decision]) -> Alternative | None:
        """Return a plan that decides the same, and of which it is known what steps take."""
        for alternative, others in self.decided.items():
            if alternative in self.search.results and others == decisions:
                return alternative
        return None

    def line(self) -> str | None:
        """Return, once, what the comparison has come to, as soon as steps follow that."""
        search = self.search
        if self.is_told or not search.is_settled or self.followed != search.current:
            return None
        self.is_told = True
        return f"stormd: of the plans that steps have followed: {self.search}"


def search_for(signature: StepSignature, problem: Problem, *, is_least: bool) -> PlanSearch:
    """Return which plans are compared of a signature whose forward pass has been timed.

    With the budget "least" half of what the device computes in a forward pass more is worth it if
    less stays: to checkpoint takes all of that more. Not of what is little.
    """
    if is_least and signature.saved_bytes <= LITTLE * device_bytes(signature.devices):
        return PlanSearch((ALL_STAYS, OFFLOAD_ALONE), slack_bytes=signature.saved_bytes)
    blocks = AS_BLOCKS if is_least and problem.checkpointed_bytes else ()
    return PlanSearch(
        (*blocks, OFFLOAD_ALONE),
        allowance=(problem.forward_seconds or 0.0) / 2 if is_least else 0.0,
        slack_bytes=max(problem.last_bytes, signature.checkpointed_bytes or 0),
    )
