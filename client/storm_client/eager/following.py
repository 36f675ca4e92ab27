"""Compiles the script of a step signature for compiled code to follow.

Of the script's events compiled code needs those that say what becomes of a saved tensor, and, where
something is recomputed, the calls of operators that made what matters. Which calls those are is
noted in a step that Python follows: each value that matters has to be one output of a single call,
and each call of the same operators has its place between them. What compiled code does not expect
it hands over to Python, which walks along the same script.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from storm_client.eager.byproducts import Byproduct
from storm_client.eager.events import CAST, SAVED
from storm_client.eager.operations import is_simple, may_draw
from storm_client.planner.decisions import Keep, Replay

if TYPE_CHECKING:
    from storm_client.eager.followed_plan import Expected, FollowedPlan
    from storm_client.eager.launches import Kernel
    from storm_client.eager.proofs import Evidence, Sizes
    from storm_client.eager.signature import StepSignature
    from storm_client.monitoring.native_counts import NativeCounts
    from storm_client.native import Native, _follow

__all__ = ["NativePath", "Noted", "Rest", "compiled"]

_CONSTANT = -1
"""Stands for an input that stays."""

LONG_ENOUGH = 16
"""Steps of the first rest."""

MOST_DOUBLED = 6
"""How often that is doubled at the most."""


class _What(IntEnum):
    """What is done at an event; as in native/script.h."""

    KEEP = 0
    PYTHON = 1
    RECOMPUTE = 2
    CALL = 3


class _Does(IntEnum):
    """What is done with a call's output; as in native/script.h."""

    COUNT = 0
    LOOK_UP = 1
    RECOMPUTE = 2


class NativePath(NamedTuple):
    """The compiled module, and what counts what it does."""

    follow: Native
    counts: NativeCounts


class Noted(NamedTuple):
    """A saved tensor, or a call's output, which has a name; as native/call_log.cpp tells it."""

    position: int
    """Of the event in the script; -1 for a call with which nothing is done."""
    name: str
    overload: str
    kernel: Kernel | None
    """Of a launch, which has neither."""
    place: int
    arguments: tuple[int, ...]
    """Which of the function's tensors the call's are; -1 for what it was not given."""
    inside: str
    """The name of the call that it is part of, which has copied what it was given; else empty."""

    @property
    def called(self) -> str | Kernel | None:
        """What was called, as far as scripts look at all calls of it; of a saved tensor nothing."""
        return self.kernel or self.name or None

    @property
    def is_used_call(self) -> bool:
        """Whether it is a call whose output matters."""
        return self.called is not None and self.position >= 0


_Event: TypeAlias = "tuple[int, int, int, Sizes, int, int, bool, bool, Any]"


class Rest:
    """Steps that Python follows before compiled code may again, since it has met something else."""

    def __init__(self) -> None:
        """Start with none."""
        self.steps = 0
        """Those that are left."""
        self._begun = 0

    def begin(self) -> None:
        """Have Python follow twice as many as the last time."""
        self.steps = LONG_ENOUGH << min(self._begun, MOST_DOUBLED)
        self._begun += 1


def _can_be_followed(signature: StepSignature, plan: FollowedPlan) -> bool:
    """Tell whether compiled code may follow a plan, as far as its replays go."""
    evidence = signature.evidence
    if not plan.has_replays:
        return True
    return bool(plan.noted) and all(
        evidence.recomputed.sizes(plan.ways[number]) or evidence.has_tried(number)
        for number, decision in enumerate(plan.decisions)
        if isinstance(decision, Replay) and signature.values[number].is_saved
    )


def compiled(
    signature: StepSignature, plan: FollowedPlan, follow: Native, counts: NativeCounts
) -> _follow.Script | None:
    """Return the script of a signature's plan, compiled; None where Python has to follow it."""
    evidence = signature.evidence
    version = evidence.version
    if plan.compiled is None or plan.compiled[0] != version:
        # This looks at all values, and is not asked every step.
        if not _can_be_followed(signature, plan):
            return None
        script = plan.script[:-1]  # behind the last event there is nothing
        if plan.has_replays:
            events = _with_calls(plan, evidence, counts)
        else:
            events = [
                _saved(plan, evidence, position, expected, counts, is_new=expected.is_new)
                for position, expected in enumerate(script)
                if expected.what is SAVED
            ]
        kept = [
            (number, plan.most[number])
            for number, decision in enumerate(plan.decisions)
            if isinstance(decision, Keep)
        ]
        plan.compiled = version, follow.Script(events, kept, len(script))
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
    what, row = _What.PYTHON, counts.row(value.layer, "deduplicated")
    if isinstance(decision, Keep):
        what, row = _What.KEEP, counts.row(value.layer, "skipped", decision.reason)
    elif isinstance(decision, Replay) and (proved or not evidence.is_given_up(value.number)):
        what, row = _What.RECOMPUTE, counts.row(value.layer, "replayed")
    matters, number = expected.matters, value.number
    return (position, what, expected.most, proved, row, number, matters, is_new, None)


def _with_calls(plan: FollowedPlan, evidence: Evidence, counts: NativeCounts) -> list[_Event]:
    """Return what a step saves and calls, in order."""
    noted, script = plan.noted, plan.script
    used = {one.called for one in noted if one.is_used_call}
    told = [one for one in noted if one.called is None or one.called in used]
    position, positions = len(script) - 1, []
    for one in reversed(told):  # a call has the place of what is saved next
        position = one.position if one.called is None else position
        positions.append(position)
    seen: set[int] = set()
    events: list[_Event] = []
    for one, at in zip(told, reversed(positions), strict=True):
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


def _call(one: Noted, expected: Expected | None) -> tuple[Any, ...]:
    head = one.name, one.overload, one.kernel, one.place, one.inside
    if expected is None:
        return (*head, _Does.COUNT, None, True, False, False, False, 0, ())
    simple = expected.what is CAST or is_simple(expected.what)
    if not expected.matters:
        return (*head, _Does.COUNT, None, simple, False, expected.leaves, False, 0, ())
    inputs: tuple[int, ...] = ()
    does = _Does.LOOK_UP
    if isinstance(expected.decision, Replay):
        does = _Does.RECOMPUTE
        inputs = tuple(_CONSTANT if n < 0 else expected.inputs[n] for n in one.arguments)
    dtype = expected.value.dtype
    random = may_draw(expected.what)
    depends = expected.what.depends if isinstance(expected.what, Byproduct) else 0
    overwrites = bool(expected.value.over) and not depends
    return (*head, does, dtype, simple, random, expected.leaves, overwrites, depends, inputs)
