"""Makes the plan that the next steps of a signature follow, of what is known of it by now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch

from storm_client.eager.byproducts import Byproduct
from storm_client.eager.comparison import Comparison, search_for
from storm_client.eager.events import SAVED, RecordedValue, saved_numbers
from storm_client.eager.operations import Function
from storm_client.errors import UsageError
from storm_client.planner.alternatives import choose_alternative
from storm_client.planner.in_flight import free_bytes, last_bytes
from storm_client.planner.machine import LinkFigures, Machine, machine_of
from storm_client.planner.plan import Plan
from storm_client.planner.prices import operation_seconds
from storm_client.planner.problem import Problem, Value
from storm_client.planner.search import NOTHING, PREDICTED, Alternative
from storm_client.planner.slowest import Agreed, Figures, Turn
from storm_client.planner.solver import Choice, choose
from storm_client.planner.thread_costs import ThreadCosts
from stormd.protocol import Budget
from stormd.protocol.sizes import format_apart

if TYPE_CHECKING:
    from storm_client.eager.signature import StepSignature

__all__ = ["PlanMaker", "PlanOptions", "planned_values"]


@dataclass(frozen=True)
class PlanOptions:
    """What the user asked for."""

    budget: Budget = "least"
    """As `stormd.protocol.parse_budget` returns it."""
    verifies: bool = False
    """Whether each tensor that is recomputed is compared with a checksum in every step."""
    replays: bool = True
    functions: frozenset[Function] = frozenset()
    """The user's own that may be recomputed."""


_HOST: Final = torch.device("cpu")

_SWITCHED_OFF: Final = "replay=False was passed"
_COMPILED: Final = "the step runs compiled code, whose operations are not seen"
"""Why nothing is recomputed."""


class PlanMaker:
    """Makes the plans of one Offload."""

    def __init__(
        self,
        options: PlanOptions,
        ratio: Callable[[], float],
        link: Callable[[torch.device], LinkFigures],
        link_of_late: Callable[[torch.device], LinkFigures],
    ) -> None:
        """`ratio` tells how well tensors have been compressed so far.

        `link` tells what the daemon knows of a device's link, `link_of_late` what it has said last,
        at no cost.
        """
        self.options = options
        self.ratio = ratio
        self._link, self._link_of_late = link, link_of_late
        self.lock = threading.RLock()
        """Held while a plan is made: operations are run again for it, by one thread at a time."""
        self.why_not = "" if options.replays else _SWITCHED_OFF
        """Why nothing may be recomputed; empty if it may."""
        self.costs = ThreadCosts()
        """What steps that follow a plan have their threads spend on what is offloaded in place."""
        self.lacked_bytes = 0
        """How much memory the devices have lacked, which plans leave free."""

    def met_compiled_code(self) -> None:
        """Recompute nothing from now on: steps run code with nobody watching."""
        self.why_not = _COMPILED

    def make(self, signature: StepSignature) -> StepSignature:
        """Have the next steps of a signature follow a new plan; return which they will be of.

        That is another where they recompute nothing: nobody watches their functions then.

        Raises:
            UsageError: the budget cannot be kept.
        """
        problem, machine, room = (
            self.problem(signature),
            self._machine(signature),
            self._asked_room(signature),
        )
        self._check_budget(problem)
        choice = self._choice(signature, problem, machine, room)
        self._follow(signature, problem, choice, machine.measured)
        if not signature.has_functions or signature.may_replay:
            return signature
        other, current = signature.without_functions(), _untimed(signature)
        if signature.comparison is not None:
            current = signature.comparison.search.current
        problem = self.problem(other)
        choice = choose_alternative(current, problem, machine, room=room)
        self._follow(other, problem, choice, machine.measured)
        return other

    def plans_for(self, budgets: Iterable[Budget], signature: StepSignature) -> list[Plan]:
        """Return what each budget would give a signature, which keeps its own."""
        problem, machine = self.problem(signature), self._machine(signature)
        rooms = (self._room(budget, signature) for budget in budgets)
        return [Plan.of(problem, choose(problem, machine, budget_bytes=room)) for room in rooms]

    def has_another_link(self, signature: StepSignature) -> bool:
        """Count a step; tell whether its plan is to be made anew, since its link is another now.

        Not while plans are compared, which are made from the same figures.
        """
        comparison, device = signature.comparison, signature.clock or _HOST
        if signature.followed is None or (comparison and not comparison.search.is_settled):
            return False
        if not signature.link.is_due():
            return False
        plan = signature.followed.shown
        return signature.link.calls(
            machine_of(device).link_by(self._link_of_late(device)),
            is_used=plan is None or plan.link_seconds > 0.0,
        )

    # --- with other ranks -------------------------------------------------------------------

    def figures(self, signature: StepSignature, steps: Sequence[Sequence[float | None]]) -> Figures:
        """Return what a plan of a signature is to be made from; `steps` took so long, by each plan.

        Raises:
            UsageError: the budget cannot be kept.
        """
        signature.is_told()  # what is learned from here on is told in the next round
        problem = self.problem(signature)
        self._check_budget(problem)
        return Figures.of(problem, self.measured(signature), self._asked_room(signature), steps)

    def decide(
        self, signature: StepSignature, slowest: Figures, followed: Sequence[Alternative]
    ) -> Agreed:
        """Return what the next steps of all ranks are to follow.

        Those of the figures have `followed` these alternatives.
        """
        signature.grow(dict(enumerate(slowest.nbytes)))
        comparison, machine = signature.comparison, slowest.machine
        if comparison is not None and comparison.is_for_another_link(machine):
            comparison.start_again(machine)
        elif comparison is not None and any(slowest.steps):
            comparison.took_in_turn(followed, slowest.steps)
        problem = slowest.put_into(self.problem(signature))
        machine = (comparison and comparison.machine) or machine
        comparison, room = self._comparison(signature, problem, machine), slowest.room
        if comparison is None:
            search = None
            untimed = _untimed(signature)
            turns = [(untimed, choose_alternative(untimed, problem, machine, room=room))]
        else:
            search, turns = comparison.search, comparison.choose_several(problem, machine, room)
        nbytes = tuple(value.nbytes for value in problem.values)
        return Agreed(tuple(Turn(*one) for one in turns), search, machine.measured, nbytes)

    def follow_agreed(
        self, signature: StepSignature, agreed: Agreed, turn: int, *, leads: bool
    ) -> StepSignature:
        """Have the next steps of a signature follow one of what ranks have agreed on, as `make`.

        What has been learned since its figures were told stays news.
        """
        is_news, (alternative, choice) = signature.is_outdated, agreed.turns[turn]
        signature.grow(dict(enumerate(agreed.nbytes)))
        problem = self.problem(signature)
        if agreed.search is not None:
            comparison = signature.comparison or signature.compare(Comparison(agreed.search))
            if not leads:
                comparison.search = agreed.search
            comparison.search.current = comparison.followed = alternative
            if not leads:
                comparison.follows(problem, choice)
        self._follow(signature, problem, choice, agreed.measured)
        planned = signature
        if signature.has_functions and not signature.may_replay:
            planned, numbers = signature.without_functions(), saved_numbers(signature.events)
            self._follow(planned, self.problem(planned), choice.of(numbers), agreed.measured)
        if is_news:
            signature.outdate()
        return planned

    # --- what a plan is made from -----------------------------------------------------------

    def problem(self, signature: StepSignature) -> Problem:
        """Return what the planner is told of a signature, waiting until its passes are timed.

        With "least" no more stays at the end of the forward pass than checkpointing would keep.
        Nothing is recomputed where nobody watches its functions.
        """
        with self.lock:
            values = planned_values(signature.values)
        times, comparison, last = signature.times, signature.comparison, 0
        if signature.is_on_gpu:
            last = last_bytes(signature.saved_bytes)
            if self.options.budget == "least":
                last = min(last, signature.checkpointed_bytes or last)
        return Problem(
            values,
            dict(signature.evidence.rejected),
            recomputes=signature.has_functions and self.why_not != _COMPILED,
            why_not=self.why_not,
            forward_seconds=_busy_seconds(signature, values),
            turn_seconds=comparison.turn_seconds(times) if comparison else times.turn_seconds(),
            last_bytes=max(0, last - self.lacked_bytes),
            block_ends=signature.block_ends,
            used_between=_used_between(signature),
            plain_loss_bytes=signature.root.plain_loss_bytes,
            finds_gradients=signature.finds_gradients,
            lacked_bytes=self.lacked_bytes,
        )

    def _machine(self, signature: StepSignature) -> Machine:
        """Return what plans of a signature are made from: of those compared the first's figures."""
        comparison = signature.comparison
        if comparison is None:
            return self.measured(signature)
        if comparison.machine is None:
            comparison.machine = self.measured(signature)
        return comparison.machine

    def measured(self, signature: StepSignature) -> Machine:
        """Return the figures that hold by now; those of the link are what it did of late."""
        device = signature.clock or _HOST
        machine = machine_of(device).with_link(self._link(device))
        signature.link.planned(machine.link)
        return machine.with_thread_store(self.costs.seconds()).compressing(self.ratio())

    def _asked_room(self, signature: StepSignature) -> int | None:
        """Return how many bytes may be kept of a step; None where as few as possible are to."""
        budget = self.options.budget
        return None if budget == "least" else self._room(budget, signature)

    def _room(self, budget: Budget, signature: StepSignature) -> int:
        """Return how many bytes may stay of a step of a signature."""
        if budget == "least":
            return 0
        if budget == "fit":
            room = free_bytes(signature.devices)
        else:
            room = int(budget * signature.saved_bytes) if isinstance(budget, float) else budget
        return max(0, room - self.lacked_bytes)

    def _check_budget(self, problem: Problem) -> None:
        largest = max((value.nbytes for value in problem.saved), default=0)
        budget = self.options.budget
        if type(budget) is int and budget < largest:
            given, needed = format_apart(budget, largest)
            raise UsageError(
                f"budget is {given}, and the largest tensor of a step has {needed}, which is the "
                "least possible; raise it, or pass budget='least'"
            )

    # --- what is chosen ---------------------------------------------------------------------

    def _comparison(
        self, signature: StepSignature, problem: Problem, machine: Machine
    ) -> Comparison | None:
        """Return how plans of a signature are compared; None before its forward pass is timed."""
        if (
            signature.comparison is None
            and signature.is_on_gpu
            and signature.times.window is not None
        ):
            search = search_for(signature, problem, is_least=self.options.budget == "least")
            signature.compare(Comparison(search, machine))
        return signature.comparison

    def _choice(
        self, signature: StepSignature, problem: Problem, machine: Machine, room: int | None
    ) -> Choice:
        """Return the choice that the next steps of a signature follow, of those that are compared.

        `room` is how many bytes may be kept; None where as few as possible are to.
        """
        comparison = self._comparison(signature, problem, machine)
        if comparison is None:
            return choose_alternative(_untimed(signature), problem, machine, room=room)
        choice = comparison.choose(problem, machine, room)
        comparison.followed = comparison.search.current
        return choice

    def _follow(
        self, signature: StepSignature, problem: Problem, choice: Choice, measured: frozenset[str]
    ) -> None:
        """Have the next steps of a signature follow a choice."""
        plan = Plan.of(problem, choice, measured)
        signature.follow(choice.decisions, self._beside_checkpointing(signature, plan))

    def _beside_checkpointing(self, signature: StepSignature, plan: Plan) -> Plan:
        """Return a plan that says what checkpointing would keep; with "least" no more is held."""
        most, held = signature.checkpointed_bytes, None
        if most is not None and self.options.budget == "least":
            held = max(0, most - plan.bytes_by_decision["keep"])
        return replace(plan, checkpointed_bytes=plan.checkpointed_bytes or most, turn_bytes=held)


def _untimed(signature: StepSignature) -> Alternative:
    """Return what steps follow whose plans are not compared, as before their passes are timed.

    On a GPU little is on the link until it is known for how long that would be hidden.
    """
    return NOTHING if signature.is_on_gpu else PREDICTED


def planned_values(values: Iterable[RecordedValue]) -> tuple[Value, ...]:
    """Return what the planner is told of a step's values.

    One that was written over another is made from the other's inputs, by both operations. What else
    its operation has written over is recomputed for another result, and takes no time here.
    """
    found: list[Value] = []
    for recorded in values:
        value = recorded.planned()
        if recorded.over:
            former = [found[number] for number in recorded.over]
            before, others = former[0], (n for n in value.inputs if n not in recorded.over)
            are_timed = before.seconds and value.seconds
            value = replace(
                value,
                inputs=(*chain.from_iterable(one.inputs for one in former), *others),
                is_expensive=value.is_expensive or before.is_expensive,
                seconds=before.seconds + value.seconds if are_timed else 0.0,
            )
        found.append(value)
    return tuple(found)


def _busy_seconds(signature: StepSignature, values: Sequence[Value]) -> float | None:
    """Return for how long the device computes in a forward pass; None where that is not known.

    What was timed is too long where the pass has waited for the link or for the thread. What the
    operations take together is too short by those that nobody knows. The plans that are compared
    tell which of them is nearer. What a call keeps is made by that call, and what it has written
    over is counted with it.
    """
    timed = signature.times.busy_seconds()
    if timed is None or not signature.is_on_gpu:
        return timed
    seconds = operation_seconds(values, machine_of(signature.clock or _HOST))
    twice = {number for what, number, *_ in signature.events if isinstance(what, Byproduct)}
    twice |= {value.over[0] for value in signature.values if value.over}
    together = sum(one for number, one in enumerate(seconds) if number not in twice)
    return min(timed, together) if together > 0.0 else timed


def _used_between(signature: StepSignature) -> dict[int, tuple[int, int]]:
    """At which moments a backward pass asks for what was saved first and last.

    An operation saves before its result is known: that has the next number. Values that no event
    tells of may lie between, so what is saved then may have a later one.
    """
    found: dict[int, tuple[int, int]] = {}
    made = -1
    for what, number, *_ in signature.events:
        if what is SAVED:
            moment = max(made + 1, number)
            first, last = found.get(number, (moment, moment))
            found[number] = max(first, moment), last
        made = max(made, number)
    return found
