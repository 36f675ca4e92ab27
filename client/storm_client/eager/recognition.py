"""Finds out which known step signature the step at hand is like.

While a step goes on it is compared with a signature that is known; where they part, another
signature that begins so far alike is followed, or none, and what comes then is offloaded. At the
end the step is a signature of its own if it was like none.

Where a router sends tokens to now these experts and now those, hardly a step runs what another has
run. To watch each of them and plan it takes the thread longer than all else, and no step ever
follows such a plan. So steps are learned only as long as they come again.

A step is expected to be of the signature that came behind the longest stretch of steps like the
latest ones: those of a GAN's two networks take turns, and a pipeline's stages in one process run
all their micro-batches one behind another. One that leaves the script of its plan in the middle
cannot be learned, since it did not look at all of its values; its signature is watched closely from
then on, without a script, until its steps have come as expected for a while.
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

__all__ = ["KNOWN_KINDS", "Recurrence", "StepRecord", "StepSignatures", "behind_repeated"]

MOST_REMEMBERED: Final = 64
"""Steps that are looked through for a stretch like the latest, which may be half as long."""

KNOWN_KINDS: Final = 8
"""Signatures remembered (training, validation, several threads) before the oldest goes."""

MOST_EVENTS = 20_000
"""A step that goes on and on, as a block around a loop does, is not watched any further."""

MOST_UNLIKE: Final = 4.0
"""Of steps, less a part for each that was like one before: from then on no new one is learned."""

FORGIVEN: Final = 0.25
"""For each that was. So a fifth of all steps may be new without end."""

FEW: Final = 2.0
"""From so many down they are learned again."""

_T = TypeVar("_T")


@dataclass(eq=False)
class StepRecord:
    """What one step has made and saved so far, and the known signature that it is like.

    While it walks along the script of that signature its own `values` are not kept.
    """

    signatures: StepSignatures
    signature: StepSignature | None
    """Which it is expected to be of, or is like so far."""
    walks: bool = False
    """Whether it may use scripts."""
    is_learned: bool = True
    """Whether its functions are watched as far as they may be."""
    is_followed: bool = False
    """Whether compiled code looks at its calls, so that values are not known here."""
    has_launches: bool = False
    """Whether it has launched kernels of Triton's, as far as that was seen."""
    has_parted: bool = False
    """Whether something has happened that was not expected of its signature."""
    ended_as: StepSignature | None = None
    """What it was in the end; None before, and for one that cannot be learned."""
    script: list[Expected] | None = None
    """What the step is expected to do; None where all events are looked at."""
    expected: Expected = NOTHING
    """What comes next in the script."""
    values: list[RecordedValue] = field(default_factory=list)
    handed_over: int = 0
    """Bytes of what it has saved, each value as often as it was."""
    larger: dict[int, int] = field(default_factory=dict)
    """Bytes of the values that have more than is known."""
    plain_loss_bytes: int = 0
    """What PyTorch's own loss would take beyond the one that it computes in tiles; see Problem."""
    gradients: Gradients = field(default_factory=Gradients)
    """Of the parameters that it was seen to read."""
    _left: StepSignature | None = None
    """Whose script was left in the middle, so that some values were not looked at."""
    _position: int = 0
    _events: list[Event] = field(default_factory=list)
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        """Begin the step."""
        self.began_as = self.signature
        """Which signature it was expected to be of."""
        self.walk_on()

    @property
    def plan(self) -> FollowedPlan | None:
        """The plan that steps of its signature follow, if there is one."""
        return None if self.signature is None else self.signature.followed

    @property
    def is_as_expected(self) -> bool:
        """Whether it has walked along its script from the first event on."""
        return self.script is not None and not self._events

    @property
    def count(self) -> int:
        """How many events there were."""
        return len(self._events) if self.script is None else self._position

    @property
    def is_full(self) -> bool:
        """Whether the step is not remembered: it is too long, or was stopped."""
        return self._is_stopped or self.count >= MOST_EVENTS

    def stop(self) -> None:
        """Remember the step no more: nobody has seen all that it did."""
        self._is_stopped, self.script, self.expected = True, None, NOTHING

    def advance(self) -> None:
        """Note that what was expected has happened."""
        assert self.script is not None
        self._position += 1
        self.expected = self.script[self._position]

    def stand_at(self, position: int) -> None:
        """Note that so many events of the script have happened."""
        if self.script is not None:
            self._position, self.expected = position, self.script[position]

    def leave_script(self) -> None:
        """Look at all events from here on, since something else has happened.

        Of a step whose calls compiled code has looked at nothing is known: it is not remembered.
        """
        self.has_parted = True
        if self.is_followed:
            self.stop()
            return
        if self._position:
            self._left = self.signature
        self._recall()

    def walk_on(self) -> None:
        """Walk along the script of the signature that was found last, if it has one."""
        script = None if self.signature is None or not self.walks else self.signature.script
        if script is not None:
            self.script = script
            self.stand_at(len(self._events))

    def key(self) -> tuple[Event, ...] | None:
        """Return all events of a step that has ended; None if they are not known."""
        signature = self.signature
        if signature is not None and len(signature.events) == self.count:
            return signature.events
        if self.script is not None:
            self._recall()  # it has ended early
        elif self._left is not None:
            return None
        return tuple(self._events)

    def add(self, value: RecordedValue) -> RecordedValue:
        """Number a new value."""
        self.values.append(value)
        return value

    def saves(self, number: int, nbytes: int) -> None:
        """Note how large a value is that is saved."""
        self.handed_over += nbytes
        signature = self.signature
        if (
            signature
            and number < len(signature.values)
            and nbytes > signature.values[number].nbytes
        ):
            self.larger[number] = nbytes

    def happened(self, event: Event, nbytes: int) -> Decision | None:
        """Note an event of a value of `nbytes`; return what becomes of that, if it is known."""
        position = len(self._events)
        self._events.append(event)
        signature = self.signature
        if signature is None:
            return None
        if position >= len(signature.events) or signature.events[position] != event:
            self.has_parted = True
            signature = self.signature = self.signatures.begins_with(self._events)
            if signature is None:
                if self._left is not None:
                    self._left.watch_closely()
                return None
        return None if signature.followed is None else signature.followed.decided(event[1], nbytes)

    def decided(self, number: int, nbytes: int) -> Decision:
        """Return what is to become of a value; one without a number is offloaded.

        So is one that is larger than the plan knows, where that would keep it.
        """
        plan = self.plan
        return OFFLOAD if plan is None else plan.decided(number, nbytes)

    def layer(self, number: int) -> str:
        """Return in which layer a value was made, empty where that is not known."""
        values = (
            self.values if self.script is None or self.signature is None else self.signature.values
        )
        return values[number].layer if 0 <= number < len(values) else ""

    def _recall(self) -> None:
        """Note what the script says has happened so far, and that it is left."""
        signature = self.signature
        assert signature is not None
        self.script, self.expected = None, NOTHING
        self._events = list(signature.events[: self._position])
        self.values = values_of(self._events, signature.values)


def _is_part(one: StepSignature, other: StepSignature, most: int) -> bool:
    """Tell whether a signature runs what another does, but for what makes at most so many bytes."""
    run = iter([event for event in one.events if event[0] is not SAVED])
    expected = next(run, None)
    for what, number, dtype, _ in other.events:
        if expected is not None and (what, dtype) == (expected[0], expected[2]):
            expected = next(run, None)
        elif what is not SAVED and other.values[number].nbytes > most:
            return False
    return expected is None


class _Unknown:
    """Stands for a step whose signature nobody knows: it is like no other."""


def behind_repeated(latest: Sequence[_T | _Unknown]) -> _T | None:
    """Return what came behind the longest stretch that is like the end; None where there is none.

    Of stretches that are as long it is the last one's.
    """
    longest, found = 0, None
    last = latest[-1] if len(latest) > 1 else _Unknown()
    if not isinstance(last, _Unknown) and latest.count(last) == len(latest):  # as mostly
        return last
    for end in reversed(range(1, len(latest))):
        if longest >= end:
            break  # none that ends before can be longer
        before = islice(reversed(latest), len(latest) - end, None)
        length = sum(1 for _ in takewhile(bool, map(is_, before, reversed(latest))))
        behind = latest[end]
        if length > longest and not isinstance(behind, _Unknown):
            longest, found = length, behind
    return found


class StepSignatures:
    """The step signatures that are known. Steps of several threads may share them."""

    def __init__(self) -> None:
        """Start without experience."""
        self._lock = threading.Lock()  # protects the table
        self._known: dict[tuple[Event, ...], StepSignature] = {}
        """The signature used last is the last. An OrderedDict would hash all events of each
        signature wherever it is looked through, which takes longer than all else that a step begins
        with."""
        self._latest: deque[StepSignature | _Unknown] = deque(maxlen=MOST_REMEMBERED)
        """Which signatures the latest steps were of."""

    @property
    def latest(self) -> StepSignature | None:
        """The signature of the last step that ended."""
        with self._lock:
            return next(reversed(self._known.values()), None)

    @property
    def expected(self) -> StepSignature | None:
        """The signature that the next step is expected to be of."""
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
            roots = dict.fromkeys(signature.root for signature in self._known.values())
        return [root for root in roots if root.is_outdated]

    def prefer(self, signature: StepSignature) -> None:
        """Have a signature be the latest, and expected where one with the same root was."""
        with self._lock:
            self._known.pop(signature.events, None)
            self._add(signature)
            self._have(
                one if isinstance(one, _Unknown) or one.root is not signature.root else signature
                for one in self._latest
            )

    def begins_with(self, events: list[Event]) -> StepSignature | None:
        """Return the signature used last whose steps begin with `events`."""
        count, begun = len(events), tuple(events)
        with self._lock:
            for signature in reversed(self._known.values()):
                if len(signature.events) >= count and signature.events[:count] == begun:
                    return signature
        return None

    def has_but_for(self, signature: StepSignature, most: int) -> bool:
        """Tell whether another is known that runs what a signature does, but for what makes little.

        That is what has at most so many bytes, and is made by one of both only.
        """
        with self._lock:
            others = [
                one for one in self._known.values() if one is not signature and one.has_functions
            ]
        return signature.has_functions and any(
            _is_part(signature, one, most) or _is_part(one, signature, most) for one in others
        )

    def ended(self, step: StepRecord) -> StepSignature | None:
        """Return the signature of a step that has ended; None for one that cannot be learned.

        That is one that made or saved nothing, or too much, or that left a script in the middle.
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
            known.came(as_expected=step.began_as is known)
            known.seen += 1
            known.grow(step.larger)
            known.has_launches |= step.has_launches
        return known

    def _learned(self, key: tuple[Event, ...], step: StepRecord) -> StepSignature:
        """Return the signature of a step that is like none that is known.

        One that it has followed may have gone meanwhile: others ended in its block, or beside it.
        """
        if step.signature is not None and step.signature.events is key:
            return step.signature
        signature = StepSignature(key, step.values, is_learned=step.is_learned)
        signature.take_times(self._known.values())
        return signature

    def _have(self, latest: Iterable[StepSignature | _Unknown]) -> None:
        self._latest = deque(latest, MOST_REMEMBERED)

    def _add(self, signature: StepSignature) -> None:
        while len(self._known) >= KNOWN_KINDS:
            gone = self._known.pop(next(iter(self._known)))
            self._have(_Unknown() if one is gone else one for one in self._latest)
        self._known[signature.events] = signature


class Recurrence:
    """Counts steps of an Offload. Threads may share it: a count that is lost decides little."""

    def __init__(self) -> None:
        """Start with the hope that each is like the first."""
        self._unlike = 0.0
        self.is_seen = True
        """Whether it is worth learning a step that is new."""

    def saw(self, *, is_new: bool) -> None:
        """Note a step."""
        change = 1.0 if is_new else -FORGIVEN
        self._unlike = min(max(self._unlike + change, 0.0), MOST_UNLIKE)
        if self._unlike >= MOST_UNLIKE:
            self.is_seen = False
        elif self._unlike <= FEW and not self.is_seen:
            self.is_seen, self._unlike = True, 0.0  # the first that is watched again is new
