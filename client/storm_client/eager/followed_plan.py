"""A plan as steps follow it: its decisions, and what steps are expected to do one after another.

Each event of the script is compared by its function and dtype alone, and only of what something is
recomputed from is it looked up which value it is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from storm_client.eager.events import SAVED, Event, RecordedValue
from storm_client.planner.decisions import OFFLOAD, Decision, Keep, Offload, Replay

if TYPE_CHECKING:
    from storm_client.eager.following import Noted
    from storm_client.native import _follow
    from storm_client.planner.plan import Plan

__all__ = ["NOTHING", "Expected", "FollowedPlan"]


class Expected(NamedTuple):
    """An event of a step that follows a plan."""

    what: Any
    """As an event begins."""
    value: RecordedValue
    decision: Decision
    matters: bool
    """Whether the value is recomputed, or another one from it."""
    is_new: bool
    """Whether no event before is of this value."""
    inputs: tuple[int, ...]
    """The numbers of what it is made from; none of what is saved."""
    leaves: bool
    """Whether the value is offloaded, saved or for what is made from it."""
    stays: str
    """Of a result that is saved, if it stays and nothing else is made from it: the reason."""
    most: int
    """Bytes for which the plan was made: if it has more, it is not kept."""

    def decided(self, nbytes: int) -> Decision:
        """Return what becomes of the value if it has so many bytes."""
        return _in_size(self.decision, nbytes, self.most)


NOTHING = Expected(
    None, RecordedValue(-1, -1, torch.uint8, torch.Size()), OFFLOAD, False, False, (), False, "", -1
)
"""Like which no event is: comes behind a script's last, and where there is none."""


class FollowedPlan:
    """Decisions that steps follow, for values of certain sizes, and how far steps are with them."""

    def __init__(
        self,
        events: tuple[Event, ...],
        values: list[RecordedValue],
        decisions: list[Decision],
        *,
        ways: list[int],
        noted: list[Noted],
        shown: Plan | None = None,
    ) -> None:
        """Begin with no step having followed it. `shown` is the plan as people see it."""
        self.decisions = decisions
        """One a value."""
        self.ways = ways
        """In which each value is recomputed; see `Ways.of`."""
        self.most = [value.nbytes for value in values]
        """Bytes of each value for which the plan was made."""
        self.script = _script(events, values, decisions)
        """What a step does that follows it, and nothing behind that."""
        self.has_replays = any(isinstance(decision, Replay) for decision in decisions)
        """Whether something is recomputed."""
        self.shown = shown
        self.told: weakref.ref[Any] | None = None
        """The session whose daemon knows the plan, which hooks tell it of."""
        self.noted = noted
        """What a step has saved and called that has followed the same decisions, where each value
        that matters was made by a single call; empty until that is known."""
        self.compiled: tuple[int, _follow.Script] | None = None
        """The script for compiled code, once a step has needed it, and how much was proved then."""
        self.steps = 0
        """Steps that have followed the decisions, and tried nothing."""
        self.by_python = 0
        """Those of them that Python has followed, where compiled code may yet."""
        self.is_settled = False
        """Whether what learning has needed of memory was given back since."""

    def goes_on_from(self, before: FollowedPlan) -> None:
        """Have steps be as far as they were with a plan of the same decisions."""
        self.steps, self.by_python = before.steps, before.by_python
        self.is_settled = before.is_settled

    def decided(self, number: int, nbytes: int) -> Decision:
        """Return what becomes of so many bytes of a value; without a number it is offloaded."""
        if not 0 <= number < len(self.decisions):
            return OFFLOAD
        return _in_size(self.decisions[number], nbytes, self.most[number])

    def news_for(self, session: object) -> Plan | None:
        """Return the plan for people, unless this session was the last that asked for it."""
        if self.told is not None and self.told() is session:
            return None
        self.told = weakref.ref(session)
        return self.shown


def _in_size(decision: Decision, nbytes: int, most: int) -> Decision:
    """Return what becomes of `nbytes` by a plan that was made for `most`: only those are kept."""
    return OFFLOAD if nbytes > most and isinstance(decision, Keep) else decision


def _script(
    events: tuple[Event, ...], values: list[RecordedValue], decisions: list[Decision]
) -> list[Expected]:
    """Return the events as a step that follows the decisions expects them, and nothing behind."""
    made = {number for number, decision in enumerate(decisions) if isinstance(decision, Replay)}
    inputs_of_made = set().union(*(values[number].inputs for number in made))
    matter = made | inputs_of_made
    seen: set[int] = set()
    found = []
    for what, number, _, inputs in events:
        is_new = number not in seen
        value, decision, matters = values[number], decisions[number], number in matter
        if what is SAVED and not (value.is_result or isinstance(decision, Replay)):
            matters = False  # recipes copy what no operation made, whatever it is
        leaves = isinstance(decision, Offload) and (value.is_saved or number in inputs_of_made)
        stays = ""
        if what is SAVED and isinstance(decision, Keep) and value.is_result and not matters:
            stays = decision.reason
        most = value.nbytes
        found.append(Expected(what, value, decision, matters, is_new, inputs, leaves, stays, most))
        seen.add(number)
        if isinstance(decision, Replay):
            seen.update(inputs)
    return [*found, NOTHING]
