"""Finds the known step signature that the current step matches.

A running step is compared with a known signature. Where they differ, the step goes on with another
signature that begins with the same events. If there is none, the rest of the step is offloaded. A
step that matched no signature becomes a signature of its own at its end.

Where a router sends tokens to changing experts, hardly any step repeats another. Watching and
planning every such step costs the thread more than all else, and no step ever follows the plan. So
steps are learned only as long as signatures recur.

The expected signature of a step is found in the history. It is the one that followed the longest
earlier run of steps that equals the latest steps. For example, the two networks of a GAN alternate,
and pipeline stages in one process run all their micro-batches one after another.

A step that leaves the script of its plan in the middle cannot be learned, since not all of its
values were looked at. Its signature is then watched closely, without a script, until its steps have
matched as expected for a while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import is_
from typing import Final, TypeVar

from storm_client.eager.events import SAVED, Event, RecordedValue, values_of
from storm_client.eager.followed_plan import NOTHING, Expected, FollowedPlan
from storm_client.eager.gradients import Gradients
from storm_client.eager.signature import StepSignature
from storm_client.planner.decisions import OFFLOAD, Decision
from storm_client.planner.problem import NO_LOSS, PlainLoss

__all__ = ["KNOWN_KINDS", "Recurrence", "StepRecord", "StepSignatures", "behind_repeated"]

MAX_REMEMBERED: Final = 64
"""Length of the history of steps; a run that is looked for in it can be half as long."""

KNOWN_KINDS: Final = 8
"""Signatures remembered (training, validation, several threads) before the oldest is dropped."""

MAX_EVENTS = 20_000
"""An endless step, as of a block around a loop, is not watched beyond this."""

MAX_UNLIKE: Final = 4.0
"""Count of new steps, less `FORGIVEN` per known one, from which no new signature is learned."""

FORGIVEN: Final = 0.25
"""Subtracted for each known step. So learning goes on if a fifth of all steps is new."""

FEW: Final = 2.0
"""At or below this count steps are learned again."""

_T = TypeVar("_T")


@dataclass(eq=False)
class StepRecord:
    """The values that one step has made and saved so far, and the known signature that it matches.

    While the step follows the script of that signature, its own `values` are not kept.
    """

    signatures: StepSignatures
    signature: StepSignature | None
    """The signature that is expected, or that the step has matched so far."""
    may_follow_script: bool = False
    """Whether it may use scripts."""
    is_learned: bool = True
    """Whether its functions are watched as far as they may be."""
    has_outgrown_plan: bool = False
    """Whether an input of recipes was offloaded that the plan keeps, since it was too large."""
    is_native: bool = False
    """Whether compiled code looks at its calls, so that values are not known here."""
    has_launches: bool = False
    """Whether it has launched Triton kernels, as far as that was seen."""
    has_diverged: bool = False
    """Whether an event has differed from its expected signature."""
    ended_as: StepSignature | None = None
    """The signature that it ended as; None before, and for a step that cannot be learned."""
    script: list[Expected] | None = None
    """The events that the step is expected to produce; None where all events are looked at."""
    expected: Expected = NOTHING
    """The next event of the script."""
    values: list[RecordedValue] = field(default_factory=list)
    saved_bytes_with_repeats: int = 0
    """Bytes saved so far, counting each save of a value."""
    larger: dict[int, int] = field(default_factory=dict)
    """Bytes of the values that are larger than the signature knows."""
    plain_loss: PlainLoss = NO_LOSS
    """What PyTorch's own loss would take beyond the loss in tiles; see Problem."""
    gradients: Gradients = field(default_factory=Gradients)
    """The gradients of the parameters that the step was seen to read."""
    _left_script_of: StepSignature | None = None
    """The signature whose script was left in the middle, so that some values were not seen."""
    _position: int = 0
    _events: list[Event] = field(default_factory=list)
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        """Begin the step."""
        self.began_as = self.signature
        """The signature that was expected at the begin."""
        self.enter_script()

    @property
    def plan(self) -> FollowedPlan | None:
        """The plan that steps of its signature follow, if there is one."""
        return None if self.signature is None else self.signature.followed

    @property
    def is_as_expected(self) -> bool:
        """Whether it has followed its script from the first event on."""
        return self.script is not None and not self._events

    @property
    def count(self) -> int:
        """The number of events so far."""
        return len(self._events) if self.script is None else self._position

    @property
    def is_full(self) -> bool:
        """Whether the step is not remembered: it is too long, or was stopped."""
        return self._is_stopped or self.count >= MAX_EVENTS

    def stop(self) -> None:
        """Stop remembering the step: some of its events were not seen."""
        self._is_stopped, self.script, self.expected = True, None, NOTHING

    def advance(self) -> None:
        """Note that the expected event has happened."""
        assert self.script is not None
        self._position += 1
        self.expected = self.script[self._position]

    def set_position(self, position: int) -> None:
        """Note that the first `position` events of the script have happened."""
        if self.script is not None:
            self._position, self.expected = position, self.script[position]

    def leave_script(self) -> None:
        """Look at all events from here on, since an unexpected one has happened.

        A step whose calls compiled code has looked at is not remembered, since its values are not
        known here.
        """
        self.has_diverged = True
        if self.is_native:
            self.stop()
            return
        if self._position:
            self._left_script_of = self.signature
        self._restore_events()

    def enter_script(self) -> None:
        """Follow the script of the signature that was found last, if it has one."""
        script = (
            None if self.signature is None or not self.may_follow_script else self.signature.script
        )
        if script is not None:
            self.script = script
            self.set_position(len(self._events))

    def key(self) -> tuple[Event, ...] | None:
        """Return all events of a step that has ended; None if they are not known."""
        signature = self.signature
        if signature is not None and len(signature.events) == self.count:
            return signature.events
        if self.script is not None:
            self._restore_events()  # it has ended early
        elif self._left_script_of is not None:
            return None
        return tuple(self._events)

    def add(self, value: RecordedValue) -> RecordedValue:
        """Append a new value to those of the step, and return it."""
        self.values.append(value)
        return value

    def record_save(self, number: int, nbytes: int) -> None:
        """Record the size of a saved value."""
        self.saved_bytes_with_repeats += nbytes
        signature = self.signature
        if (
            signature
            and number < len(signature.values)
            and nbytes > signature.values[number].nbytes
        ):
            self.larger[number] = nbytes

    def record_event(self, event: Event, nbytes: int) -> Decision | None:
        """Record an event of a value of `nbytes`; return the decision for it; None if unknown."""
        position = len(self._events)
        self._events.append(event)
        signature = self.signature
        if signature is None:
            return None
        if position >= len(signature.events) or signature.events[position] != event:
            self.has_diverged = True
            signature = self.signature = self.signatures.begins_with(self._events)
            if signature is None:
                if self._left_script_of is not None:
                    self._left_script_of.watch_closely()
                return None
        return None if signature.followed is None else self.decision_for(event[1], nbytes)

    def decision_for(self, number: int, nbytes: int) -> Decision:
        """Return the decision for a value of `nbytes`; one without a valid number is offloaded.

        A value that the plan keeps is offloaded as well if it is larger than the plan knows.
        """
        return OFFLOAD if self.plan is None else self.plan.decision_for(number, nbytes)

    def decision_for_input(self, number: int, nbytes: int) -> Decision:
        """Return the decision for a value that recipes read; note where its size changes that."""
        decision = self.decision_for(number, nbytes)
        plan, signature = self.plan, self.signature
        if plan is None or signature is None or not 0 <= number < len(plan.decisions):
            return decision
        if nbytes > signature.values[number].nbytes:
            self.larger[number] = nbytes
        self.has_outgrown_plan |= decision != plan.decisions[number]
        return decision

    def layer(self, number: int) -> str:
        """Return the layer in which a value was made; empty where it is not known."""
        values = (
            self.values if self.script is None or self.signature is None else self.signature.values
        )
        return values[number].layer if 0 <= number < len(values) else ""

    def _restore_events(self) -> None:
        """Leave the script, and restore the events and values so far from it."""
        signature = self.signature
        assert signature is not None
        self.script, self.expected = None, NOTHING
        self._events = list(signature.events[: self._position])
        self.values = values_of(self._events, signature.values)


def _is_part(one: StepSignature, other: StepSignature, max_bytes: int) -> bool:
    """Return whether `one` runs what `other` runs, except events of values up to `max_bytes`."""
    run = iter([event for event in one.events if event[0] is not SAVED])
    expected = next(run, None)
    for what, number, dtype, _ in other.events:
        if expected is not None and (what, dtype) == (expected[0], expected[2]):
            expected = next(run, None)
        elif what is not SAVED and other.values[number].nbytes > max_bytes:
            return False
    return expected is None


class _Unknown:
    """Stands for a step without a known signature; equal to no other step."""


def behind_repeated(latest: Sequence[_T | _Unknown]) -> _T | None:
    """Return what followed the longest earlier run equal to the end of `latest`; None if no run.

    Among runs of equal length the latest one counts.
    """
    longest, found = 0, None
    last = latest[-1] if len(latest) > 1 else _Unknown()
    if not isinstance(last, _Unknown) and latest.count(last) == len(latest):  # the usual case
        return last
    for end in reversed(range(1, len(latest))):
        if longest >= end:
            break  # none that ends earlier can be longer
        before = islice(reversed(latest), len(latest) - end, None)
        length = sum(1 for _ in takewhile(bool, map(is_, before, reversed(latest))))
        behind = latest[end]
        if length > longest and not isinstance(behind, _Unknown):
            longest, found = length, behind
    return found


class StepSignatures:
    """The known step signatures. Steps of several threads may share them."""

    def __init__(self) -> None:
        """Start without known signatures."""
        self._lock = threading.RLock()  # protects the table; a signal handler may read it
        self._known: dict[tuple[Event, ...], StepSignature] = {}
        """The most recently used signature is the last. An OrderedDict would hash all events of
        each signature whenever it is iterated, which takes longer than all else at a step's
        begin."""
        self._latest: deque[StepSignature | _Unknown] = deque(maxlen=MAX_REMEMBERED)
        """The signatures of the latest steps."""

    @property
    def latest(self) -> StepSignature | None:
        """The signature of the last step that ended."""
        with self._lock:
            return next(reversed(self._known.values()), None)

    @property
    def expected(self) -> StepSignature | None:
        """The expected signature of the next step."""
        with self._lock:
            found = behind_repeated(self._latest)
            return found or next(reversed(self._known.values()), None)

    def outdate(self) -> None:
        """Have all plans made anew."""
        with self._lock:
            for signature in self._known.values():
                signature.outdate()

    def outdated(self) -> list[StepSignature]:
        """Return the signatures that have to be planned."""
        with self._lock:
            outdated = (one.root for one in self._known.values() if one.is_outdated)
            return list(dict.fromkeys(outdated))

    def prefer(self, signature: StepSignature) -> None:
        """Make a signature the latest, and expect it where one with the same root was expected."""
        with self._lock:
            self._known.pop(signature.events, None)
            self._add(signature)
            self._have(
                one if isinstance(one, _Unknown) or one.root is not signature.root else signature
                for one in self._latest
            )

    def begins_with(self, events: list[Event]) -> StepSignature | None:
        """Return the most recently used signature whose steps begin with `events`."""
        count, begun = len(events), tuple(events)
        with self._lock:
            for signature in reversed(self._known.values()):
                if len(signature.events) >= count and signature.events[:count] == begun:
                    return signature
        return None

    def has_except_small(self, signature: StepSignature, max_bytes: int) -> bool:
        """Return whether a known signature runs the same but for events of small values.

        Those are values of at most `max_bytes` that only one of the two signatures makes.
        """
        with self._lock:
            others = [
                one for one in self._known.values() if one is not signature and one.has_functions
            ]
        return signature.has_functions and any(
            _is_part(signature, one, max_bytes) or _is_part(one, signature, max_bytes)
            for one in others
        )

    def ended(self, step: StepRecord) -> StepSignature | None:
        """Return the signature of a step that has ended; None for one that cannot be learned.

        Such a step made or saved nothing, had too many events or some that nobody saw, or left a
        script in the middle.
        """
        key = None if step.is_full else step.key()
        with self._lock:
            if key is None:
                self._latest.append(_Unknown())
            if not key:
                return None
            known = next(reversed(self._known.values()), None)
            if known is None or known.events is not key:  # hashing it takes longer than all else
                known = self._known.pop(key, None) or self._learned(key, step)
                self._add(known)
            self._latest.append(known)
            known.note_ended(as_expected=step.began_as is known)
            known.seen += 1
            known.grow(step.larger)
            known.has_launches |= step.has_launches
        return known

    def _learned(self, key: tuple[Event, ...], step: StepRecord) -> StepSignature:
        """Return the signature of a step that matches no known one.

        The signature that the step has followed may have been dropped meanwhile, when other steps
        ended within its block or in other threads. That signature is then returned.
        """
        if step.signature is not None and step.signature.events is key:
            return step.signature
        signature = StepSignature(key, step.values, is_learned=step.is_learned)
        signature.take_times(self._known.values())
        return signature

    def _have(self, latest: Iterable[StepSignature | _Unknown]) -> None:
        self._latest = deque(latest, MAX_REMEMBERED)

    def _add(self, signature: StepSignature) -> None:
        while len(self._known) >= KNOWN_KINDS:
            gone = self._known.pop(next(iter(self._known)))
            self._have(_Unknown() if one is gone else one for one in self._latest)
        self._known[signature.events] = signature


class Recurrence:
    """Counts recurring steps of an Offload. Threads may share it: a lost count matters little."""

    def __init__(self) -> None:
        """Start with the assumption that steps recur."""
        self._unlike = 0.0
        self.is_seen = True
        """Whether it is worth learning a new step."""

    def count_step(self, *, is_new: bool) -> None:
        """Count a step."""
        change = 1.0 if is_new else -FORGIVEN
        self._unlike = min(max(self._unlike + change, 0.0), MAX_UNLIKE)
        if self._unlike >= MAX_UNLIKE:
            self.is_seen = False
        elif self._unlike <= FEW and not self.is_seen:
            self.is_seen, self._unlike = True, 0.0  # the next watched step is new
