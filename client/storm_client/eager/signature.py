"""What the steps of an Offload did, one record for each step signature.

Two steps are of one kind if they made and saved the same values in the same order: the same
functions on the same inputs, and the same dtypes. A value is one storage at one version. Sizes are
no part of it: batches are of many lengths. Of each value the largest size seen is known, and plans
are made for those; what is larger than its plan knows is not kept, so that budgets hold.

While a step goes on it is compared with a kind that is known; where they part, another kind that
begins so far alike is followed, or none, and what comes then is offloaded. At the end the step is a
kind of its own if it was like none.

A step that follows a plan walks along its kind's script: each event is compared by its function
and dtype alone, and only of what something is recomputed from is it looked up which value it
is. A step that leaves the script in the middle cannot be learned, since it did not look at all of
its values; its kind is watched closely from then on, without a script.

Nothing here decides what is returned: that a value can be recomputed is shown by what the step at
hand has run, never by what another did.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from storm_client.eager.proofs import Proofs, Ways
from storm_client.eager.step_times import OBSERVED, Duration, StepTimes
from storm_client.planner.blocks import block_ends
from storm_client.planner.decisions import OFFLOAD, Decision, Keep, Offload, Replay
from storm_client.planner.in_flight import last_bytes
from storm_client.planner.machine import machine_of
from storm_client.planner.prices import likeness, operation_seconds
from storm_client.planner.problem import Problem, Value

if TYPE_CHECKING:
    from storm_client.eager.following import Noted
    from storm_client.native import _follow
    from storm_client.planner.machine import Machine
    from storm_client.planner.plan import Plan
    from storm_client.planner.search import Alternative, PlanSearch

__all__ = [
    "CAST",
    "KNOWN_KINDS",
    "NEAR_LARGEST",
    "SAVED",
    "Event",
    "Expected",
    "Kind",
    "Kinds",
    "RecordedValue",
    "StepRecord",
    "saved_numbers",
]

KNOWN_KINDS = 8
"""Kinds of steps remembered (training, validation, several threads) before the oldest goes."""

MOST_TRIES = 16
"""Of a value by one plan. So many forward passes may be in flight before the first backward pass; a
value that none has asked for by then is one that none will ask for."""

MOST_EVENTS = 20_000
"""A step that goes on and on, as a block around a loop does, is not watched any further."""


_HOST: Final = torch.device("cpu")


NEAR_LARGEST: Final = 0.97
"""Of what the largest step saves: steps that save as much are compared by what they take."""

Event: TypeAlias = tuple[Any, int, torch.dtype | None, tuple[int, ...]]
"""SAVED, CAST or the function that was run; the value's number and dtype; its inputs.

Of what is saved neither dtype nor inputs are told."""

SAVED, CAST = "saved", "cast"
"""Autograd saves a value; autocast has made a value that was saved."""


@dataclass(slots=True)
class RecordedValue:
    """A storage at one version: what an operation made, or what autograd saved of unknown origin.

    `nbytes` is that of the whole storage, `seconds` what making it took. Of a kind's value `nbytes`
    is the most of all steps, and `seconds` what making so many takes.
    """

    number: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device = _HOST
    is_result: bool = True
    """Whether an operation made it that autograd knows of: then its changes are counted."""
    made_by: str = ""
    """The name of its node in the graph; empty for what no operation made."""
    operation: str = ""
    """The function's name; empty where it is not known, or cannot be recomputed."""
    is_expensive: bool = False
    inputs: tuple[int, ...] = ()
    """Numbers of the large values among its arguments."""
    uses: int = 0
    """How often it was saved."""
    layer: str = ""
    """In which layer of the model, empty where that is not known."""
    seconds: float = 0.0
    timing: Callable[[], float] | None = None
    """Tells `seconds` once the device has come that far."""

    @property
    def is_saved(self) -> bool:
        """Whether autograd has saved it."""
        return self.uses > 0

    @property
    def is_timed(self) -> bool:
        """Whether it is known what making it took, or will be."""
        return self.timing is not None or self.seconds > 0.0

    def grow(self, nbytes: int) -> None:
        """Be of more bytes: making them takes longer by as much."""
        factor = nbytes / self.nbytes if self.nbytes else 1.0
        self.nbytes, self.seconds = nbytes, factor * self.seconds
        if self.timing is not None:
            timing = self.timing
            self.timing = lambda: factor * timing()

    def planned(self) -> Value:
        """Return what the planner is told of it; waits until the device has made it."""
        if self.timing is not None:
            self.seconds, self.timing = self.timing(), None
        return Value(
            self.number,
            self.nbytes,
            self.dtype,
            tuple(self.shape),
            operation=self.operation,
            is_expensive=self.is_expensive,
            inputs=self.inputs,
            seconds=self.seconds,
            uses=self.uses,
        )


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


_NOTHING = Expected(
    None, RecordedValue(-1, -1, torch.uint8, torch.Size()), OFFLOAD, False, False, (), False, "", -1
)
"""Like which no event is: comes behind a script's last, and where there is none."""


class Compilation:
    """What compiled code needs to follow steps with some decisions."""

    __slots__ = ("known", "noted", "script")

    def __init__(self) -> None:
        """Start without any."""
        self.known = (0, 0)
        """How much was proved, and how many plans were made, when the script was compiled."""
        self.noted: list[Noted] | None = None
        """What a step that followed them has saved and called, where each value that matters was
        made by a single call; None until that is known."""
        self.script: _follow.Script | None = None
        """The script, once a step has needed it."""


class Kind:
    """One step signature: its values, what was decided for each, and what was seen of replays."""

    search: PlanSearch | None = None
    """Which plan its steps follow next, once it is known what their forward pass takes."""
    is_learned = True
    """Whether the functions of its steps were watched as far as they may be."""
    seen = 0
    """Steps that were like it."""
    machine: Machine | None = None
    """The figures that its latest plan was made from."""
    origin: Kind | None = None
    """The kind of the same step with its functions, where this one is without."""
    _is_unsettled = False
    """Whether its steps follow new decisions, and memory of those before was not given back."""
    _gave_back = False
    """Whether that was done before."""

    _turn = math.inf
    """Seconds from the end of a forward pass until something is asked for, as plans know it."""

    has_launches = False
    """Whether some of its steps have launched kernels of Triton's."""
    plans = 0
    """How often one was made."""
    rests = 0
    """Steps that Python follows before compiled code may again."""
    parted = 0
    """Steps that compiled code has followed to where they did something else."""

    def __init__(
        self, events: tuple[Event, ...], values: list[RecordedValue], functions: int = 0
    ) -> None:
        """Describe a step that made and saved `values`, and ran `functions` of the table."""
        self.events = events
        self.values = values
        self.functions = functions
        self.devices = _gpus(values)
        """On which its values lie, that with the most bytes first."""
        self.has_functions = any(event[0] is not SAVED for event in events)
        """Whether what its steps ran was recorded, beside what they saved."""
        self.decisions: list[Decision] | None = None
        """One a value; None until there is a plan."""
        self.has_replays = True
        """Whether something is recomputed, or nobody knows yet."""
        self.plan: Plan | None = None
        """The same for people."""
        self.told: weakref.ref[Any] | None = None
        """The session whose daemon knows the present plan, which hooks tell it of."""
        self.proofs, self._ways = Proofs(), Ways()
        """Which ways to recompute values make the same bits."""
        self.ways: list[int] = []
        """That of each value by the present decisions; see `Ways.of`."""
        self.most = [value.nbytes for value in values]
        """Bytes of each value for which the latest was."""
        self.rejected: dict[int, str] = {}
        """Values that were not, with the reason."""
        self._tries: Counter[int] = Counter()
        """How often a value has been tried by the present decisions."""
        self._never_asked: set[int] = set()
        """Values that were tried in vain by some decisions."""
        self.unchanged = Proofs()
        """Of values that leave as they were made, however late that is."""
        self.changed: set[int] = set()
        """Values that were not."""
        self.is_outdated = True
        """Whether something was learned that the plan does not know."""
        self.script: list[Expected] | None = None
        """What a step that follows the plan does, and nothing behind that; None where it has to be
        watched closely."""
        self.is_ambiguous = False
        """Whether a step was like this one and then did something else."""
        self.followed = 0
        """Steps that followed the present decisions, and tried nothing."""
        self.times = StepTimes(is_on_gpu=self.is_on_gpu)
        """What its steps took."""
        self.by_python = 0
        """Steps that Python has followed by the present decisions, and that tried nothing."""
        self.native = Compilation()
        """Of the present decisions."""
        self._natives: dict[tuple[Decision, ...], Compilation] = {}
        self.compared: dict[Alternative, list[Decision]] = {}
        """What the plans decide that are compared."""

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan for it."""
        return self.decisions is not None

    @property
    def is_on_gpu(self) -> bool:
        """Whether its values lie in a GPU's memory."""
        return bool(self.devices)

    @property
    def clock(self) -> torch.device | None:
        """The GPU that its passes are timed on; None for the host."""
        return self.devices[0] if self.devices else None

    @cached_property
    def saved_bytes(self) -> int:
        """What the largest of its steps saves: of each value the most."""
        return sum(value.nbytes for value in self.values if value.is_saved)

    @cached_property
    def handed_over_bytes(self) -> int:
        """The same, where each value counts as often as it is saved."""
        return sum(value.nbytes * value.uses for value in self.values)

    @cached_property
    def block_ends(self) -> frozenset[int]:
        """The values that checkpointing each block of its steps would keep."""
        return block_ends(self.values)

    @cached_property
    def checkpointed_bytes(self) -> int | None:
        """What those come to; None where no blocks are known."""
        if self.origin is not None:
            return self.origin.checkpointed_bytes
        return sum(self.values[n].nbytes for n in self.block_ends) or None

    def follow(self, decisions: list[Decision]) -> None:
        """Follow these from now on. What is recomputed in a new way has to prove itself anew.

        What a value is made from may be another now, and what is the same by one way may not be by
        another, where something writes to memory without being counted.
        """
        self.is_outdated = False
        self.plans += 1
        self.most = [value.nbytes for value in self.values]
        if decisions != self.decisions:
            self.followed = self.by_python = 0
            self._tries.clear()
            self._is_unsettled = True
            self.native = self._natives.setdefault(tuple(decisions), Compilation())
            self.ways = self._ways.of(self.values, decisions)
        self.decisions = decisions
        self.has_replays = any(isinstance(decision, Replay) for decision in decisions)
        self.script = None if self.is_ambiguous else _script(self.events, self.values, decisions)

    def is_proved(self, number: int, nbytes: int) -> bool:
        """Tell whether the present way to recompute a value makes the same bits at a size."""
        return self.proofs.holds(self.ways[number], nbytes)

    def prove(self, number: int, way: int, nbytes: int) -> None:
        """Note that a value was recomputed in some way and was the same at a size."""
        self.proofs.add(way, nbytes)
        self._tries.pop(number, None)

    def grow(self, sizes: Mapping[int, int]) -> None:
        """Know values by number to have so many bytes in some step; what is larger is news.

        What nobody saves, whose sizes are not noted, is taken to grow as all that is saved does.
        """
        larger = {n: nbytes for n, nbytes in sizes.items() if nbytes > self.values[n].nbytes}
        if not larger:
            return
        before = self.saved_bytes
        for number, nbytes in larger.items():
            self.values[number].grow(nbytes)
        for name in ("saved_bytes", "handed_over_bytes", "checkpointed_bytes", "block_ends"):
            self.__dict__.pop(name, None)
        growth = self.saved_bytes / before if before else 1.0
        for value in self.values:
            if not value.is_saved:
                value.grow(int(growth * value.nbytes))
        self.is_outdated = True
        if self.origin is not None:
            numbers = saved_numbers(self.origin.events)
            self.origin.grow({numbers[n]: nbytes for n, nbytes in larger.items()})
            return
        self.times.grow(growth)
        if self.search is not None and growth * NEAR_LARGEST > 1.0:
            self.search.forget()

    def measured_like(self, decisions: list[Decision]) -> Alternative | None:
        """Return a plan that decides the same, and of which it is known what steps take."""
        assert self.search is not None
        for alternative, others in self.compared.items():
            if alternative in self.search.results and others == decisions:
                return alternative
        return None

    def watch_closely(self) -> None:
        """Have no step walk along the script any more."""
        self.is_ambiguous, self.script = True, None

    def has_tried(self, number: int) -> bool:
        """Tell whether no backward pass is expected to ask for a value any more."""
        return number in self._never_asked or self._tries[number] > MOST_TRIES

    def goes_on_trying(self, number: int) -> bool:
        """Tell whether the backward passes may yet show what a value's trials are to show.

        Not of what they never ask for.
        """
        self._tries[number] += 1
        if self._tries[number] <= MOST_TRIES and number not in self._never_asked:
            return True
        self._never_asked.add(number)
        return False

    def settles(self) -> bool:
        """Tell, once, whether steps have got used to the present decisions.

        While plans are compared that is told of the first alone, and of the one that stays.
        """
        is_searching = self.search is not None and not self.search.is_settled
        if self.followed < OBSERVED or not self._is_unsettled or (is_searching and self._gave_back):
            return False
        self._is_unsettled, self._gave_back = is_searching, True
        return True

    @property
    def wants_full_queue(self) -> bool:
        """Whether the next forward pass is to be timed with all of it in the device's queue."""
        return self.decisions is not None and self.times.wants_full_queue

    def observe(self, forward: Duration, share: float = 1.0) -> None:
        """Note a forward pass that followed the plan; two of them make it anew.

        It has handed over a `share` of what the largest does.
        """
        self.followed += 1
        if self.times.observe(forward, share):
            self.is_outdated = True

    def share(self, handed_over: int) -> float:
        """Return which part so many bytes are of those that the largest step hands over."""
        return min(1.0, handed_over / self.handed_over_bytes) if handed_over else 1.0

    def turned(self, turn: Duration) -> None:
        """Note how long after the end of a forward pass the backward pass asked for something."""
        self.times.turned(turn)

    def without_functions(self) -> Kind:
        """Return the kind of the same step where nobody watches its functions."""
        saved = [event for event in self.events if event[0] is SAVED]
        numbers = {old: new for new, old in enumerate(saved_numbers(saved))}
        values = [replace(self.values[old], number=new, inputs=()) for old, new in numbers.items()]
        events = tuple((what, numbers[old], *rest) for what, old, *rest in saved)
        kind = Kind(events, values)
        kind.rejected = {numbers[old]: why for old, why in self.rejected.items() if old in numbers}
        kind.times, kind.search = self.times, self.search
        kind.origin, kind.machine = self, self.machine
        return kind

    def problem(self, *, recomputes: bool, why_not: str) -> Problem:
        """Return what the planner is told of it, waiting until its passes are timed.

        `recomputes` says whether anything may be recomputed, `why_not` for what reason it may not.
        """
        values = tuple(value.planned() for value in self.values)
        return Problem(
            values,
            dict(self.rejected),
            recomputes=recomputes,
            why_not=why_not,
            forward_seconds=self._busy_seconds(values),
            turn_seconds=self._turn_seconds(),
            last_bytes=last_bytes(self.saved_bytes) if self.is_on_gpu else 0,
            block_ends=self.block_ends,
            used_between=self._used_between,
        )

    @cached_property
    def _used_between(self) -> dict[int, tuple[int, int]]:
        """At which moments a backward pass asks for what was saved first and last.

        An operation saves before its result is known: that has the next number.
        """
        found: dict[int, tuple[int, int]] = {}
        made = -1
        for what, number, *_ in self.events:
            if what is SAVED:
                first, last = found.get(number, (made + 1, made + 1))
                found[number] = max(first, made + 1), last
            made = max(made, number)
        return found

    def _turn_seconds(self) -> float:
        """Return what plans are told of the turn: while some are compared, the same as the first.

        It differs from step to step, and the plan that is followed in the end would not be the one
        that was measured: its replays would have to prove themselves once more.
        """
        if self.search is None or math.isinf(self._turn):
            self._turn = self.times.turn_seconds()
        return self._turn

    def take_times(self, others: Iterable[Kind]) -> None:
        """Take what operations took in other signatures where they are alike and have no time.

        What a step does as others before it did is not timed again.
        """
        known: dict[object, RecordedValue] = {}
        for kind in others:
            for value in kind.values:
                if value.operation and value.is_timed:
                    known.setdefault((value.device, likeness(value, kind.values)), value)
        for value in self.values:
            if value.operation and not value.is_timed:
                like = known.get((value.device, likeness(value, self.values)))
                if like is not None:
                    value.seconds, value.timing = like.seconds, like.timing

    def _busy_seconds(self, values: Sequence[Value]) -> float | None:
        """Return for how long the device computes in a forward pass; None where that is not known.

        What was timed is too long where the pass has waited for the link or for the thread. What
        the operations take together is too short by those that nobody knows. The plans that are
        compared tell which of them is nearer.
        """
        timed = self.times.busy_seconds()
        if timed is None or not self.is_on_gpu:
            return timed
        seconds = operation_seconds(values, machine_of(self.clock or _HOST))
        together = sum(seconds)
        return min(timed, together) if together > 0.0 else timed

    def reject(self, number: int, reason: str) -> None:
        """Note that a value cannot be had again by its operation."""
        self.rejected.setdefault(number, reason)
        self.is_outdated = True


def _in_size(decision: Decision, nbytes: int, most: int) -> Decision:
    """Return what becomes of `nbytes` by a plan that was made for `most`: only those are kept."""
    return OFFLOAD if nbytes > most and isinstance(decision, Keep) else decision


def saved_numbers(events: Iterable[Event]) -> list[int]:
    """Return the numbers of what autograd saves, in the order in which it first does."""
    return list(dict.fromkeys(number for what, number, *_ in events if what is SAVED))


def _gpus(values: Iterable[RecordedValue]) -> tuple[torch.device, ...]:
    nbytes: Counter[torch.device] = Counter()
    for value in values:
        if value.device.type == "cuda":
            nbytes[value.device] += value.nbytes
    return tuple(device for device, _ in nbytes.most_common())


class StepRecord:
    """What one step has made and saved so far, and the known kind that it is like.

    While it walks along the script of that kind its own `values` are not kept.
    """

    __slots__ = (
        "_events",
        "_is_stopped",
        "_kinds",
        "_left",
        "_position",
        "_walks",
        "ended_as",
        "expected",
        "functions",
        "handed_over",
        "has_launches",
        "has_parted",
        "is_followed",
        "is_learned",
        "kind",
        "larger",
        "script",
        "values",
    )

    def __init__(self, kinds: Kinds, kind: Kind | None, *, walks: bool = False) -> None:
        """Begin a step that is expected to be of `kind`; `walks` says that it may use scripts."""
        self._kinds = kinds
        self._walks = walks
        self._left: Kind | None = None
        """Whose script was left in the middle, so that some values were not looked at."""
        self.kind = kind
        self.ended_as: Kind | None = None
        """What it was in the end; None before, and for one that cannot be learned."""
        self.is_learned = True
        """Whether its functions are watched as far as they may be."""
        self.is_followed = False
        """Whether compiled code looks at its calls, so that values are not known here."""
        self.has_launches = False
        """Whether it has launched kernels of Triton's, as far as that was seen."""
        self.has_parted = False
        """Whether something has happened that was not expected of its kind."""
        self.script: list[Expected] | None = None
        """What the step is expected to do; None where all events are looked at."""
        self._position = 0
        self.expected = _NOTHING
        """What comes next in the script."""
        if walks and kind is not None and kind.script is not None:
            self._follow(kind.script, 0)
        self._events: list[Event] = []
        self.values: list[RecordedValue] = []
        self._is_stopped = False
        self.functions = 0
        """How many of the table it has run, as far as they were watched."""
        self.handed_over = 0
        """Bytes of what it has saved, each value as often as it was."""
        self.larger: dict[int, int] = {}
        """Bytes of the values that have more than its plan knows."""

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
        self._is_stopped, self.script, self.expected = True, None, _NOTHING

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
        if self.is_followed:
            self.has_parted = True
            self.stop()
            return
        if self._position:
            self._left = self.kind
        self.has_parted = True
        self._recall()

    def walk_on(self) -> None:
        """Walk along the script of the kind that was found last, if it has one."""
        kind = self.kind
        if self._walks and kind is not None and kind.script is not None:
            self._follow(kind.script, len(self._events))

    def key(self) -> tuple[Event, ...] | None:
        """Return all events of a step that has ended; None if they are not known."""
        kind = self.kind
        if kind is not None and len(kind.events) == self.count:
            return kind.events
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
        kind = self.kind
        if kind is not None and number < len(kind.most) and nbytes > kind.most[number]:
            self.larger[number] = nbytes

    def happened(self, event: Event, nbytes: int) -> Decision | None:
        """Note an event of a value of `nbytes`; return what becomes of that, if it is known."""
        position = len(self._events)
        self._events.append(event)
        kind = self.kind
        if kind is None:
            return None
        if position >= len(kind.events) or kind.events[position] != event:
            self.has_parted = True
            kind = self.kind = self._kinds.begins_with(self._events)
            if kind is None:
                if self._left is not None:
                    self._left.watch_closely()
                return None
        return None if kind.decisions is None else self.decided(event[1], nbytes)

    def decided(self, number: int, nbytes: int) -> Decision:
        """Return what is to become of a value; one without a number is offloaded.

        So is one that is larger than the plan knows, where that would keep it.
        """
        kind = self.kind
        if kind is None or kind.decisions is None or not 0 <= number < len(kind.decisions):
            return OFFLOAD
        return _in_size(kind.decisions[number], nbytes, kind.most[number])

    def layer(self, number: int) -> str:
        """Return in which layer a value was made, empty where that is not known."""
        values = self.values if self.script is None or self.kind is None else self.kind.values
        return values[number].layer if 0 <= number < len(values) else ""

    def _follow(self, script: list[Expected], position: int) -> None:
        self.script, self._position, self.expected = script, position, script[position]

    def _recall(self) -> None:
        """Note what the script says has happened so far, and that it is left."""
        kind = self.kind
        assert kind is not None
        self.script, self.expected = None, _NOTHING
        self._events = list(kind.events[: self._position])
        self.values = values_of(self._events, kind.values)


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
    return [*found, _NOTHING]


def values_of(events: list[Event], known: list[RecordedValue]) -> list[RecordedValue]:
    """Return the values of some events, the first of a step whose values are known."""
    numbers = chain.from_iterable((number, *inputs) for _, number, _, inputs in events)
    count = max(numbers, default=-1) + 1
    values = [
        replace(value, operation="", is_expensive=False, inputs=(), uses=0)
        for value in known[:count]
    ]
    for what, number, *_ in events:
        value, like = values[number], known[number]
        if what is SAVED:
            value.uses += 1
        else:
            value.operation, value.is_expensive = like.operation, like.is_expensive
            value.inputs = like.inputs
    return values


def _is_part(one: Kind, other: Kind, most: int) -> bool:
    """Tell whether a kind runs what another does, but for what makes at most so many bytes."""
    run = iter([event for event in one.events if event[0] is not SAVED])
    expected = next(run, None)
    for what, number, dtype, _ in other.events:
        if expected is not None and (what, dtype) == (expected[0], expected[2]):
            expected = next(run, None)
        elif what is not SAVED and other.values[number].nbytes > most:
            return False
    return expected is None


class Kinds:
    """The step signatures that are known. Steps of several threads may share them."""

    def __init__(self) -> None:
        """Start without experience."""
        self._lock = threading.Lock()  # protects the table
        self._known: dict[tuple[Event, ...], Kind] = {}
        """The kind used last is the last. An OrderedDict would hash all events of each kind
        wherever it is looked through, which takes longer than all else that a step begins with."""

    @property
    def latest(self) -> Kind | None:
        """The kind of the last step that ended."""
        with self._lock:
            return next(reversed(self._known.values()), None)

    def outdate(self) -> None:
        """Have all plans made anew."""
        with self._lock:
            for kind in self._known.values():
                kind.is_outdated = True

    def outdated(self) -> list[Kind]:
        """Return the kinds that have to be planned."""
        with self._lock:
            return [kind for kind in self._known.values() if kind.is_outdated]

    def prefer(self, kind: Kind) -> Kind:
        """Have a kind, or the one that is known of the same steps, be the latest; return it."""
        with self._lock:
            known = self._known.pop(kind.events, kind)
            self._add(known)
            return known

    def begins_with(self, events: list[Event]) -> Kind | None:
        """Return the kind used last whose steps begin with `events`."""
        count, begun = len(events), tuple(events)
        with self._lock:
            for kind in reversed(self._known.values()):
                if len(kind.events) >= count and kind.events[:count] == begun:
                    return kind
        return None

    def has_but_for(self, kind: Kind, most: int) -> bool:
        """Tell whether another is known that runs what a kind does, but for what makes little.

        That is what has at most so many bytes, and is made by one of both only.
        """
        with self._lock:
            others = [one for one in self._known.values() if one is not kind and one.has_functions]
        return kind.has_functions and any(
            _is_part(kind, one, most) or _is_part(one, kind, most) for one in others
        )

    def ended(self, step: StepRecord) -> Kind | None:
        """Return the kind of a step that has ended; None for one that cannot be learned.

        That is one that made or saved nothing, or too much, or that left a script in the middle.
        """
        if not step.count or step.is_full:
            return None
        key = step.key()
        if key is None:
            return None
        with self._lock:
            latest = next(reversed(self._known.values()), None)
            if latest is not None and latest.events is key:
                latest.seen += 1
                latest.grow(step.larger)
                latest.has_launches |= step.has_launches
                return latest  # without the key's hash, which takes longer than all else here
            known = self._known.pop(key, None)
            if known is None:
                known = Kind(key, step.values, step.functions)
                known.is_learned = step.is_learned
                known.take_times(self._known.values())
            known.seen += 1
            known.grow(step.larger)
            known.has_launches |= step.has_launches
            self._add(known)
        return known

    def _add(self, kind: Kind) -> None:
        while len(self._known) >= KNOWN_KINDS:
            del self._known[next(iter(self._known))]
        self._known[kind.events] = kind
