"""A plan as steps follow it: its decisions, and its script, the events that steps should produce.

An event of a step is compared with the script by function and dtype alone. The value of an event is
looked up only where the value is recomputed or something is recomputed from it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from storm_client.eager.events import SAVED, Event, LoggedEvent, RecordedValue
from storm_client.eager.ways import first_readers, ways_of
from storm_client.planner.decisions import OFFLOAD, Decision, Keep, Replay

if TYPE_CHECKING:
    from storm_client.native import _follow
    from storm_client.planner.plan import Plan

__all__ = ["NOTHING", "Expected", "FollowedPlan"]


class Expected(NamedTuple):
    """An event of a step that follows a plan."""

    what: Any
    """The first item of an `Event`."""
    value: RecordedValue
    decision: Decision
    matters: bool
    """Whether the value is recomputed, or another one from it."""
    is_new: bool
    """Whether no earlier event is of this value."""
    inputs: tuple[int, ...]
    """The numbers of the values that it is made from; empty for a save."""
    keep_reason: str
    """Why a saved result is kept, if nothing else is recomputed from it; otherwise empty."""
    max_bytes: int
    """Bytes for which the plan was made: a larger value is not kept."""

    def decision_for(self, nbytes: int) -> Decision:
        """Return the decision for the value if it has `nbytes`."""
        return _in_size(self.decision, nbytes, self.max_bytes)


NOTHING = Expected(
    None, RecordedValue(-1, -1, torch.uint8, torch.Size()), OFFLOAD, False, False, (), "", -1
)
"""Matches no event: stands after a script's last event, and where there is no script."""


class FollowedPlan:
    """Decisions that steps follow, for values up to certain sizes, and the steps' progress."""

    def __init__(
        self,
        events: tuple[Event, ...],
        values: list[RecordedValue],
        decisions: list[Decision],
        *,
        logged: list[LoggedEvent],
        shown: Plan | None = None,
    ) -> None:
        """Begin before any step has followed the plan. `shown` is the plan as users see it."""
        self.decisions = decisions
        """One per value."""
        self.first_readers = first_readers(events, values, decisions)
        """For each input that recipes copy, the value whose operation is to read it first."""
        self.ways = ways_of(values, decisions, self.first_readers)
        """The way in which each value is recomputed."""
        self.max_bytes = [value.nbytes for value in values]
        """Bytes of each value for which the plan was made."""
        self.script = _script(events, values, decisions)
        """The events of a step that follows the plan, then `NOTHING`."""
        self.has_replays = any(isinstance(decision, Replay) for decision in decisions)
        """Whether something is recomputed."""
        self.shown = shown
        self.last_session: weakref.ref[Any] | None = None
        """The session whose daemon knows the plan; the step's hooks send the plan there."""
        self.logged = logged
        """The saves and calls of a step that has followed the same decisions, where a single call
        made each value that matters; empty until that is known."""
        self.compiled: tuple[int, _follow.Script] | None = None
        """The script for compiled code, once a step has needed it, preceded by the
        `Evidence.version` that it was made for."""
        self.steps = 0
        """Steps that have followed the decisions without a trial."""
        self.by_python = 0
        """Those of them that Python has followed, though compiled code may follow later ones."""
        self.is_settled = False
        """Whether the memory that learning needed has been given back since."""

    def goes_on_from(self, before: FollowedPlan) -> None:
        """Take over the progress of an earlier plan with the same decisions."""
        self.steps, self.by_python = before.steps, before.by_python
        self.is_settled = before.is_settled

    def decision_for(self, number: int, nbytes: int) -> Decision:
        """Return the decision for a value of `nbytes`; one without a valid number is offloaded."""
        if not 0 <= number < len(self.decisions):
            return OFFLOAD
        return _in_size(self.decisions[number], nbytes, self.max_bytes[number])

    def unsent_plan(self, session: object) -> Plan | None:
        """Return the plan as users see it, unless this session was the last to ask for it."""
        if self.last_session is not None and self.last_session() is session:
            return None
        self.last_session = weakref.ref(session)
        return self.shown


def _in_size(decision: Decision, nbytes: int, max_bytes: int) -> Decision:
    """Return the decision for a value of `nbytes`; one larger than `max_bytes` is not kept."""
    return OFFLOAD if nbytes > max_bytes and isinstance(decision, Keep) else decision


def _script(
    events: tuple[Event, ...], values: list[RecordedValue], decisions: list[Decision]
) -> list[Expected]:
    """Return the events as a step that follows the decisions expects them, then `NOTHING`."""
    made = {number for number, decision in enumerate(decisions) if isinstance(decision, Replay)}
    matter = made.union(*(values[number].inputs for number in made))
    seen: set[int] = set()
    found = []
    for what, number, _, inputs in events:
        is_new = number not in seen
        value, decision, matters = values[number], decisions[number], number in matter
        if what is SAVED and not (value.is_result or isinstance(decision, Replay)):
            matters = False  # recipes copy what no operation made, so its identity is not needed
        keep_reason = ""
        if what is SAVED and isinstance(decision, Keep) and value.is_result and not matters:
            keep_reason = decision.reason
        max_bytes = value.nbytes
        found.append(
            Expected(what, value, decision, matters, is_new, inputs, keep_reason, max_bytes)
        )
        seen.add(number)
        if isinstance(decision, Replay):
            seen.update(inputs)
    return [*found, NOTHING]
