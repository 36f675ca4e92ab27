"""Compiles the script of a step signature, so that compiled code can follow it.

Compiled code needs the script's saves, with their decisions. Where something is recomputed, it also
needs the operator calls that made the values that matter. A step that Python follows records these
calls: each value that matters has to be one output of a single call, and all other calls of the
same operators are counted in between. Compiled code passes an unexpected event to Python, which
follows the same script.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from storm_client.eager.byproducts import Byproduct
from storm_client.eager.events import CAST, SAVED, LoggedEvent
from storm_client.eager.operations import choice_of, may_draw
from storm_client.eager.settings import KernelChoice
from storm_client.planner.decisions import Keep, Replay

if TYPE_CHECKING:
    from storm_client.eager.followed_plan import Expected, FollowedPlan
    from storm_client.eager.proofs import Evidence, Sizes
    from storm_client.monitoring.native_counts import NativeCounts
    from storm_client.native import Native, _follow

__all__ = ["PythonFallback", "compiled"]

_CONSTANT = -1
"""Stands for an input that is always kept: small, or a parameter."""

MIN_FALLBACK_STEPS = 16
"""Steps of the first fallback."""

MAX_DOUBLED = 6
"""The largest number of times that the length of a fallback doubles."""


class _What(IntEnum):
    """The action at an event; as in native/script.h."""

    KEEP = 0
    OFFLOAD = 1
    RECOMPUTE = 2
    CALL = 3


class _Does(IntEnum):
    """The action for a call's output; as in native/script.h."""

    COUNT = 0
    LOOK_UP = 1
    RECOMPUTE = 2


_Event: TypeAlias = "tuple[int, int, int, Sizes, int, int, bool, bool, Any]"


class PythonFallback:
    """Counts the steps that Python follows after compiled code has met an unexpected event."""

    def __init__(self) -> None:
        """Start with none."""
        self.steps = 0
        """Steps left before compiled code may follow again."""
        self._begun = 0

    def begin(self) -> None:
        """Begin a fallback, twice as long as the one before, up to a limit."""
        self.steps = MIN_FALLBACK_STEPS << min(self._begun, MAX_DOUBLED)
        self._begun += 1


def _can_be_followed(plan: FollowedPlan, evidence: Evidence) -> bool:
    """Return whether what a plan recomputes allows compiled code to follow it."""
    if not plan.has_replays:
        return True
    saved = {one.value.number for one in plan.script if one.what is SAVED}
    return bool(plan.logged) and all(
        evidence.recomputed.sizes(plan.ways[number]) or evidence.has_tried(number)
        for number in saved
        if isinstance(plan.decisions[number], Replay)
    )


def compiled(
    plan: FollowedPlan,
    evidence: Evidence,
    follow: Native,
    counts: NativeCounts,
    *,
    counts_gradless: bool,
) -> _follow.Script | None:
    """Return the compiled script of a signature's plan; None where Python has to follow it.

    `evidence` is the signature's.
    """
    version = evidence.version
    if plan.compiled is None or plan.compiled[0] != version:
        # This check looks at all values, so it does not run in every step.
        if not _can_be_followed(plan, evidence):
            return None
        script = plan.script[:-1]  # without NOTHING at its end
        if plan.has_replays:
            events = _with_calls(plan, evidence, counts)
        else:
            events = [
                _saved(plan, evidence, position, expected, counts, is_new=expected.is_new)
                for position, expected in enumerate(script)
                if expected.what is SAVED
            ]
        values = [
            (nbytes, isinstance(decision, Keep))
            for nbytes, decision in zip(plan.max_bytes, plan.decisions, strict=True)
        ]
        plan.compiled = version, follow.Script(events, values, len(script), counts_gradless)
    return plan.compiled[1]


def _saved(
    plan: FollowedPlan,
    evidence: Evidence,
    position: int,
    expected: Expected,
    counts: NativeCounts,
    *,
    is_new: bool,
) -> _Event:
    value, decision = expected.value, expected.decision
    proved = evidence.recomputed.sizes(plan.ways[value.number])
    what, row = _What.OFFLOAD, counts.row(value.layer, "deduplicated")
    if isinstance(decision, Keep):
        what, row = _What.KEEP, counts.row(value.layer, "skipped", decision.reason)
    elif isinstance(decision, Replay) and (proved or not evidence.is_never_requested(value.number)):
        what, row = _What.RECOMPUTE, counts.row(value.layer, "replayed")
    matters, number = expected.matters, value.number
    return (position, what, expected.max_bytes, proved, row, number, matters, is_new, None)


def _with_calls(plan: FollowedPlan, evidence: Evidence, counts: NativeCounts) -> list[_Event]:
    """Return the saves and calls of a step, in order."""
    logged, script = plan.logged, plan.script
    used = {one.called for one in logged if one.is_used_call}
    used_events = [one for one in logged if one.called is None or one.called in used]
    position, positions = len(script) - 1, []
    for one in reversed(used_events):  # a call has the position of the next save
        position = one.position if one.called is None else position
        positions.append(position)
    seen: set[int] = set()
    events: list[_Event] = []
    for one, at in zip(used_events, reversed(positions), strict=True):
        expected = script[one.position] if one.position >= 0 else None
        number = -1 if expected is None else expected.value.number
        is_new = number not in seen
        seen.add(number)
        if one.called and expected is not None and isinstance(expected.decision, Replay):
            seen.update(expected.inputs)
        if one.called:
            call = _call(one, expected)
            matters = expected is not None
            events.append((at, _What.CALL, 0, (), 0, number, matters, is_new, call))
        elif expected is not None:
            events.append(_saved(plan, evidence, at, expected, counts, is_new=is_new))
    return events


def _call(one: LoggedEvent, expected: Expected | None) -> tuple[Any, ...]:
    head = one.name, one.overload, one.kernel, one.place, one.inside
    if expected is None:
        return (*head, _Does.COUNT, None, KernelChoice.NONE, False, False, 0, ())
    choice = KernelChoice.NONE if expected.what is CAST else choice_of(expected.what)
    if not expected.matters:
        return (*head, _Does.COUNT, None, choice, False, False, 0, ())
    inputs: tuple[int, ...] = ()
    does = _Does.LOOK_UP
    if isinstance(expected.decision, Replay):
        does = _Does.RECOMPUTE
        inputs = tuple(_CONSTANT if n < 0 else expected.inputs[n] for n in one.arguments)
    dtype = expected.value.dtype
    random = may_draw(expected.what)
    depends = expected.what.depends if isinstance(expected.what, Byproduct) else 0
    overwrites = bool(expected.value.over) and not depends
    return (*head, does, dtype, choice, random, overwrites, depends, inputs)
