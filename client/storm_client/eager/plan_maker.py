"""Makes the plan that the next steps of a signature follow, from what is known of it so far."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch

from storm_client.eager.byproducts import Byproduct
from storm_client.eager.comparison import Comparison
from storm_client.eager.events import SAVED, RecordedValue, saved_numbers
from storm_client.eager.operations import Function
from storm_client.errors import UsageError
from storm_client.planner.alternatives import choose_alternative
from storm_client.planner.in_flight import device_bytes, free_bytes, in_flight_bytes, last_bytes
from storm_client.planner.machine import Machine, TransferFigures, machine_of
from storm_client.planner.plan import Plan
from storm_client.planner.prices import operation_seconds
from storm_client.planner.problem import Problem, Value
from storm_client.planner.search import (
    ALL_KEPT,
    AS_BLOCKS,
    NOTHING,
    OFFLOAD_ALONE,
    PREDICTED,
    Alternative,
    PlanSearch,
)
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
    """The user's options for plans."""

    budget: Budget = "least"
    """As `stormd.protocol.parse_budget` returns it."""
    verifies: bool = False
    """Whether each recomputed tensor is compared with a checksum in every step."""
    replays: bool = True
    functions: frozenset[Function] = frozenset()
    """The user's own functions that may be recomputed."""


log = logging.getLogger(__name__)

_HOST: Final = torch.device("cpu")

LITTLE: Final = 1 / 128
"""Share of a device's memory: freeing less is not worth a longer, CPU-bound step."""

_SWITCHED_OFF: Final = "replay=False was passed"
_COMPILED: Final = "the step runs compiled code, whose operations are not seen"
"""Why nothing is recomputed."""


class PlanMaker:
    """Makes the plans of one Offload."""

    def __init__(
        self,
        options: PlanOptions,
        ratio: Callable[[], float],
        link: Callable[[torch.device], TransferFigures],
        latest_figures: Callable[[torch.device], TransferFigures],
    ) -> None:
        """`ratio` returns the compression ratio of the tensors so far.

        `link` returns what the daemon knows of a device's link. `latest_figures` returns the
        daemon's last answer, at no cost.
        """
        self.options = options
        self.ratio = ratio
        self._link, self._latest_figures = link, latest_figures
        self.lock = threading.RLock()
        """Held while a plan is made: one thread at a time runs operations again to time them."""
        self.why_not = "" if options.replays else _SWITCHED_OFF
        """Why nothing may be recomputed; empty if it may."""
        self.costs = ThreadCosts()
        """The thread time that steps following a plan spend on tensors offloaded in place."""
        self.lacked_bytes = 0
        """Bytes that the devices have lacked so far; plans leave them free."""
        self._has_planned = False
        """Whether a plan was made that keeps the budget."""
        self._has_warned = False
        """Whether it was said that a later one does not."""

    def met_compiled_code(self) -> None:
        """Recompute nothing from now on: steps run compiled code, which nobody watches."""
        self.why_not = _COMPILED

    def make(self, signature: StepSignature) -> StepSignature:
        """Have the next steps of a signature follow a new plan; return their expected signature.

        Steps that recompute nothing get another signature, since nobody watches their functions.

        Raises:
            UsageError: the budget cannot be kept, and no plan before has kept it.
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
        """Return the plan for each budget for a signature, which keeps its own plan."""
        problem, machine = self.problem(signature), self._machine(signature)
        rooms = (self._room(budget, signature) for budget in budgets)
        return [Plan.of(problem, choose(problem, machine, budget_bytes=room)) for room in rooms]

    def has_another_link(self, signature: StepSignature, steps: int) -> bool:
        """Count steps; return whether to remake their plan because the link's speed has changed.

        False while plans are compared, since all of these are made from the same figures.
        """
        comparison, device = signature.comparison, signature.clock or _HOST
        if signature.followed is None or (comparison and not comparison.search.is_settled):
            return False
        if not signature.link.is_due(steps):
            return False
        plan = signature.followed.shown
        return signature.link.needs_new_plan(
            machine_of(device).link_by(self._latest_figures(device)),
            is_used=plan is None or plan.link_seconds > 0.0,
        )

    # --- with other ranks -------------------------------------------------------------------

    def figures(self, signature: StepSignature, steps: Sequence[Sequence[float | None]]) -> Figures:
        """Return the figures for a signature's plan; `steps` holds the times by each plan.

        Raises:
            UsageError: the budget cannot be kept, and no plan before has kept it.
        """
        signature.mark_planned()  # later knowledge is reported in the next round
        problem = self.problem(signature)
        self._check_budget(problem)
        return Figures.of(problem, self.measured(signature), self._asked_room(signature), steps)

    def decide(
        self, signature: StepSignature, slowest: Figures, followed: Sequence[Alternative]
    ) -> Agreed:
        """Return the plans that the next steps of all ranks follow.

        The steps in the figures of the slowest rank followed the alternatives `followed`.
        """
        signature.grow(dict(enumerate(slowest.nbytes)))
        comparison, machine = signature.comparison, slowest.machine
        if comparison is not None and comparison.is_for_another_link(machine):
            comparison.start_again(machine)
        elif comparison is not None and any(slowest.steps):
            comparison.record_turns(followed, slowest.steps)
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
        """Have the next steps of a signature follow one of the agreed plans; return as `make` does.

        If something was learned after the figures were reported, the signature stays outdated.
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
                comparison.record_decisions(problem, choice)
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
        """Return the planner's problem for a signature, waiting until its passes are timed.

        With "least" no more is kept at the end of the forward pass than checkpointing would keep.
        Nothing is recomputed where nobody watches the signature's functions.
        """
        with self.lock:
            signature.evidence.settle()
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
            plain_loss=signature.root.plain_loss,
            finds_gradients=signature.finds_gradients,
            lacked_bytes=self.lacked_bytes,
        )

    def _machine(self, signature: StepSignature) -> Machine:
        """Return the figures for a signature's plans: compared plans share those of the first."""
        comparison = signature.comparison
        if comparison is None:
            return self.measured(signature)
        if comparison.machine is None:
            comparison.machine = self.measured(signature)
        return comparison.machine

    def measured(self, signature: StepSignature) -> Machine:
        """Return the current figures; those of the link are its recent ones."""
        device = signature.clock or _HOST
        machine = machine_of(device).with_transfers(self._link(device))
        signature.link.planned(machine.link)
        costs = self.costs
        return machine.with_thread(costs.store(), costs.recompute).compressing(self.ratio())

    def _asked_room(self, signature: StepSignature) -> int | None:
        """Return the number of bytes that a step may keep; None means as few as possible."""
        budget = self.options.budget
        return None if budget == "least" else self._room(budget, signature)

    def _room(self, budget: Budget, signature: StepSignature) -> int:
        """Return the number of bytes that a step of a signature may keep."""
        if budget == "least":
            return 0
        if budget == "fit":
            room = free_bytes(signature.devices)
        else:
            room = int(budget * signature.saved_bytes) if isinstance(budget, float) else budget
        return max(0, room - self.lacked_bytes)

    def _check_budget(self, problem: Problem) -> None:
        """Raise if the first plan cannot keep the budget; warn if a later one cannot.

        A batch may be longer than all before. Training goes on, and keeps as little as possible.
        """
        largest = max((value.nbytes for value in problem.saved), default=0)
        budget = self.options.budget
        if type(budget) is not int or budget >= largest:
            self._has_planned = True
            return
        given, needed = format_apart(budget, largest)
        message = (
            f"budget is {given}, and the largest tensor of a step has {needed}, which is the "
            "least possible; raise it, or pass budget='least'"
        )
        if not self._has_planned:
            raise UsageError(message)
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s; until then such steps keep as little as possible", message)

    # --- what is chosen ---------------------------------------------------------------------

    def _comparison(
        self, signature: StepSignature, problem: Problem, machine: Machine
    ) -> Comparison | None:
        """Return the comparison of a signature's plans; None before its forward pass is timed."""
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
        """Return the choice, among those compared, that the next steps of a signature follow.

        `room` is the number of bytes that may be kept; None means as few as possible.
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
        """Return the plan with the bytes that checkpointing would keep: a limit with "least".

        If no blocks are known, the limit is what may be in flight in any case.
        """
        most, held = signature.checkpointed_bytes, None
        stored = [row.nbytes for row in plan.rows if row.decision == "offload"]
        in_flight = in_flight_bytes(stored) if signature.is_on_gpu else 0
        if self.options.budget == "least":
            held = in_flight if most is None else max(0, most - plan.bytes_by_decision["keep"])
        return replace(
            plan,
            checkpointed_bytes=plan.checkpointed_bytes or most,
            turn_bytes=held,
            in_flight_bytes=in_flight,
        )


def search_for(signature: StepSignature, problem: Problem, *, is_least: bool) -> PlanSearch:
    """Return which plans to compare for a signature whose forward pass has been timed.

    With the budget "least", steps may take longer to keep less: by up to half of the device's
    compute time in a forward pass. Checkpointing would cost all of it. This does not hold where a
    step saves little.
    """
    if is_least and signature.saved_bytes <= LITTLE * device_bytes(signature.devices):
        return PlanSearch((ALL_KEPT, OFFLOAD_ALONE), slack_bytes=signature.saved_bytes)
    blocks = AS_BLOCKS if is_least and problem.checkpointed_bytes else ()
    return PlanSearch(
        (*blocks, OFFLOAD_ALONE),
        allowance=(problem.forward_seconds or 0.0) / 2 if is_least else 0.0,
        slack_bytes=max(problem.last_bytes, signature.checkpointed_bytes or 0),
    )


def _untimed(signature: StepSignature) -> Alternative:
    """Return the alternative for a signature before its passes are timed and plans compared.

    On a GPU little is offloaded until it is known how much transfer time is hidden.
    """
    return NOTHING if signature.is_on_gpu else PREDICTED


def planned_values(values: Iterable[RecordedValue]) -> tuple[Value, ...]:
    """Return a step's values as the planner needs them.

    A value that overwrote another value is made from the other's inputs, by both operations. The
    further values that its operation overwrote are recomputed for another result of it, and their
    time does not count here.
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
    """Return the seconds that the device computes in a forward pass; None where not known.

    The timed pass is too long where it has waited for the link or for the thread. The sum of the
    operations is too short by those that are not recorded. The comparison of plans shows which of
    the two is closer. A byproduct takes no time besides its call. An overwritten value's time is
    counted in the value that overwrote it.
    """
    timed = signature.times.busy_seconds()
    if timed is None or not signature.is_on_gpu:
        return timed
    seconds = operation_seconds(values, machine_of(signature.clock or _HOST))
    twice = {number for what, number, *_ in signature.events if isinstance(what, Byproduct)}
    twice |= {value.over[0] for value in signature.values if value.over}
    together = sum(one for number, one in enumerate(seconds) if number not in twice)
    if len(signature.devices) > 1 and math.isfinite(together):
        return together  # the timed pass is that of one GPU
    return min(timed, together) if together > 0.0 else timed


def _used_between(signature: StepSignature) -> dict[int, tuple[int, int]]:
    """Return the first and the last moment at which the backward pass asks for each saved value.

    An operation saves tensors before its result is known, so their moment is the number of the next
    value. The saved value itself may have a later number, since values without an event may lie
    between.
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
