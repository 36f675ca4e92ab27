"""Has the steps of an Offload follow a plan: learns their kinds, plans each, and tries replays.

The first step of a kind offloads all, and is watched and timed. The next follows the plan that is
made of it, but hands over, too, what it recomputes, and compares: a value whose bits differ once
is never recomputed. From then on nothing is handed over twice. What was learned in between makes
the plan anew where the next step begins.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from storm_client.eager.following import LONG_ENOUGH, MOST_DOUBLED, NativePath, compiled
from storm_client.eager.function_modes import is_in_compiled_code
from storm_client.eager.launches import LaunchWatch, watch_launches
from storm_client.eager.operation_times import OperationTimes, keep_busy
from storm_client.eager.operations import REPLAYABLE, Function
from storm_client.eager.ranks import Ranks
from storm_client.eager.recompute import Trial
from storm_client.eager.recorder import Mark, Recorder, Span
from storm_client.eager.recording import Recording
from storm_client.eager.recurrence import Recurrence
from storm_client.eager.signature import (
    NEAR_LARGEST,
    Kind,
    Kinds,
    StepRecord,
    saved_numbers,
)
from storm_client.errors import UsageError
from storm_client.monitoring.layers import Layers
from storm_client.planner.alternatives import choose_alternative, staying_bytes
from storm_client.planner.decisions import Decision
from storm_client.planner.in_flight import (
    device_bytes,
    free_bytes,
    give_back_unused,
)
from storm_client.planner.machine import LinkFigures, Machine, machine_of
from storm_client.planner.plan import Plan
from storm_client.planner.problem import Problem
from storm_client.planner.search import (
    ALL_STAYS,
    AS_BLOCKS,
    OFFLOAD_ALONE,
    PREDICTED,
    Alternative,
    PlanSearch,
)
from storm_client.planner.shortage import lacked
from storm_client.planner.slowest import Agreed, Figures
from storm_client.planner.solver import Choice, choose
from stormd.protocol import Budget
from stormd.protocol.sizes import format_apart

if TYPE_CHECKING:
    from storm_client.eager.recompute import Pins
    from storm_client.eager.step_times import StepTimes
    from storm_client.native import Native, _follow
    from storm_client.saved.ranges import WeakStorage
    from storm_client.saved.snapshots import Ready, ReadyTrial

__all__ = ["PlanOptions", "PlannedStep", "Planning"]


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


LITTLE: Final = 1 / 128
"""Of a device's memory: to free less is not worth a step that the thread makes longer."""

FINER: Final = 8
"""By how much smaller tensors are handled where many steps differ by whether some are too small."""

FINEST: Final = 64
"""By how much at the most."""

NEAR: Final = 16
"""Times the least bytes: what is as small may be too small in a step that is shorter by as much."""

MOST_BY_PYTHON: Final = 4
"""Steps for which compiled code is waited for before those that Python follows are compared."""

_HOST: Final = torch.device("cpu")

_SWITCHED_OFF: Final = "replay=False was passed"
_COMPILED: Final = "the step runs compiled code, whose operations are not seen"
"""Why nothing is recomputed."""


class Planning:
    """The step signatures of one Offload, and their plans. Threads may share it."""

    def __init__(
        self,
        options: PlanOptions,
        ratio: Callable[[], float],
        layers: Layers,
        link: Callable[[torch.device], LinkFigures],
    ) -> None:
        """Start without experience; `ratio` tells how well tensors have been compressed so far.

        `layers` tells in which layer a value is made, `link` what the daemon knows of a device's.
        """
        self._link = link
        self._layers = layers
        self.options = options
        self._functions = REPLAYABLE | options.functions
        self._runs_compiled_code = False
        """Whether one of its blocks has, or lies in some. Its functions are watched no more."""
        self._ratio = ratio
        self._kinds = Kinds()
        self._pinned: deque[tuple[weakref.ref[Pins], list[WeakStorage]]] = deque()
        """What the steps know storages by, and what has to be freed when it has died."""
        self._operations = OperationTimes()
        self._making = threading.RLock()
        """Held while a plan is made: operations are run again for it, by one thread at a time."""
        self._finer = 1
        """By how much what is handled may be smaller than the user says."""
        self._short = 0
        """How much memory the devices have lacked, as far as plans know."""
        self._recurrence = Recurrence()
        self._ranks = Ranks((options.budget, options.verifies, options.replays), options.functions)
        self._thread = threading.local()
        """What the step of each thread has followed whose block has ended last."""

    def least(self, min_bytes: int) -> int:
        """Return how many bytes a tensor needs to have in order not to stay.

        They are fewer than `min_bytes` where steps of several sizes would else differ in what they
        do, and no compiled code could follow them.
        """
        return max(1, min_bytes // self._finer)

    def begin(
        self,
        least: int,
        *,
        pack: Callable[[torch.Tensor, Decision, str], Any],
        unpack: Callable[[Any], torch.Tensor],
        publish: Callable[[torch.Tensor], int],
        is_ready: Callable[[torch.Tensor, Ready], None],
        native: NativePath | None = None,
        follow: Native | None = None,
    ) -> PlannedStep:
        """Begin a step, whose tensors of `least` bytes matter; see Recording for the callables.

        It is followed by compiled code where `native` can do that. `follow` is that code where it
        is there at all: what operations draw and launch is only seen with it.

        Raises:
            UsageError: the budget cannot be kept.
        """
        self._free_pins()
        learns = self._recurrence.is_seen
        self._make_plans(learns=learns)
        kind = self._kinds.latest
        if kind is not None and kind.is_on_gpu and kind.settles():
            give_back_unused(kind.devices)
        watches = self._is_watched(kind, learns=learns)
        walks = kind is not None and kind.has_functions == watches
        step = StepRecord(self._kinds, kind, walks=walks)
        step.is_learned = learns
        fills = kind is not None and kind.wants_full_queue
        script = None
        if native is not None and not fills:
            script = self._compiled(step, native)
        calls = None
        if native is not None and watches and script is None:
            calls = self._call_log(step, native, max(least, 1))
        recording = Recording(
            step,
            max(least, 1),
            pack=partial(_pack_input, step, pack),
            unpack=unpack,
            publish=None if self.options.verifies else publish,
            is_ready=is_ready,
            functions=self._functions,
            layers=self._layers,
            calls=calls,
        )
        self._pinned.append((weakref.ref(recording.pins), recording.pins.storages))
        mode = None
        launches = None
        if watches and script is None:
            note_draw = None if follow is None else follow.note_draw
            mode = Recorder(recording, self._operations, measures=kind is None, note_draw=note_draw)
            launches = watch_launches(follow, mode)
        if fills and kind is not None and kind.clock is not None:
            with torch.cuda.device(kind.clock):
                keep_busy(kind.times.pass_seconds)
        begun = Mark(None if kind is None else kind.clock)
        self._note_last_step(begun)
        counts = kind is not None and (
            native is None or script is not None or kind.by_python >= MOST_BY_PYTHON
        )
        return PlannedStep(
            self,
            recording,
            mode,
            begun,
            fills=fills,
            counts=counts,
            compiled=script,
            calls=calls,
            launches=launches,
        )

    def _make_plans(self, *, learns: bool) -> None:
        """Make anew the plans of which more is known by now, and new ones if steps are learned."""
        self._compare_plans()
        self._note_shortage()
        if self._ranks.are_sharing:
            self._ranks.agree(self, self._kinds.outdated())
        for one in self._kinds.outdated():
            if not self._ranks.shares(one) and (one.is_planned or (learns and one.is_learned)):
                self._make_again(one)

    def _is_watched(self, kind: Kind | None, *, learns: bool) -> bool:
        """Tell whether the functions of a step are watched that is expected to be of a kind.

        So they are where something is recomputed, or may be; of steps that no other is like they
        are not, until such steps come again.
        """
        if not self.options.replays or self._may_run_compiled_code():
            return False
        if kind is None or kind.is_planned:
            return kind is None or kind.has_replays
        return learns

    def _compiled(self, step: StepRecord, native: NativePath) -> _follow.Script | None:
        """Return what compiled code may follow from the step's begin on."""
        kind = step.kind
        if kind is None or step.script is None or self.options.verifies:
            return None
        if kind.rests > 0:
            kind.rests -= 1
            return None
        return compiled(kind, native.follow, native.counts)

    def _call_log(self, step: StepRecord, native: NativePath, least: int) -> _follow.CallLog | None:
        """Return what notes the calls of a step, if that has to be done."""
        kind = step.kind
        if (
            kind is None
            or step.script is None
            or kind.native.noted is not None
            or self.options.verifies
        ):
            return None
        return native.follow.CallLog(least)  # type: ignore[no-any-return]

    def _may_run_compiled_code(self) -> bool:
        if not self._runs_compiled_code:
            self._runs_compiled_code = is_in_compiled_code()
        return self._runs_compiled_code

    def _note_shortage(self) -> None:
        """Have plans made anew, with less room, where a device's memory has run out since."""
        short = lacked(self.devices)
        if short != self._short:
            self._short = short
            self._kinds.outdate()

    def _note_last_step(self, begun: Mark) -> None:
        """Note what the step took that this thread has begun before, now that another begins."""
        followed: _FollowedStep | None = getattr(self._thread, "followed", None)
        self._thread.followed = None
        if followed is not None and followed.begun.device == begun.device:
            span = Span(followed.begun, begun) if followed.is_compared else None
            followed.times.took(followed.alternative, span)

    def _compare_plans(self) -> None:
        """Have the latest kind follow another plan where what steps took says so."""
        kind = self._kinds.latest
        if kind is None or kind.search is None:
            return
        if self._ranks.shares(kind):
            self._ranks.took(kind, [seconds for _, seconds in kind.times.known_steps()])
            return
        goes_on = False
        for alternative, seconds in kind.times.known_steps():
            goes_on |= kind.search.took(alternative, seconds)
        if goes_on:
            self._kinds.prefer(kind.origin or kind).is_outdated = True

    def met_compiled_code(self) -> None:
        """Note that a block has run compiled code, which is run with nobody watching."""
        self._runs_compiled_code = True

    def ended(
        self,
        step: StepRecord,
        begun: Mark,
        *,
        least: int,
        pass_seconds: float,
        is_trial: bool,
        fills: bool,
        counts: bool,
    ) -> Kind | None:
        """Learn from a step that has ended; return its kind if it has followed that one's plan.

        What has `least` bytes was looked at. `pass_seconds` is how long its forward pass was by the
        host's clock. `fills` tells whether the device's queue was full, `counts` whether later
        steps will take as long.
        """
        followed = step.kind
        step.ended_as = kind = self._kinds.ended(step)
        if step.count:  # not of a validation, which saves nothing
            self._recurrence.saw(is_new=kind is None or kind.seen == 1)
        if kind is not None:
            self._ranks.ended(kind)
            if kind.seen == 1 and self._finer < FINEST:
                self._look_finer(kind, least)
        if kind is None or kind is not followed or kind.decisions is None:
            return None
        kind.times.pass_seconds = pass_seconds
        if is_trial:
            return None
        share = kind.share(step.handed_over)
        if fills:
            kind.times.filled(begun.until_now(), share)
            return None
        kind.observe(begun.until_now(), share)
        kind.by_python += not counts
        if kind.search is not None and counts:
            is_compared = share >= NEAR_LARGEST
            self._thread.followed = _FollowedStep(
                kind.times, kind.search.current, begun, is_compared
            )
        return kind

    def _look_finer(self, kind: Kind, least: int) -> None:
        """Handle smaller tensors, and learn anew, if a new kind differs from one by those alone."""
        if least > 1 and self._kinds.has_but_for(kind, NEAR * least):
            self._finer *= FINER
            self._kinds, self._recurrence = Kinds(), Recurrence()

    def plan(self) -> Plan | None:
        """Return the plan of the latest kind."""
        kind = self._kinds.latest
        if kind is None:
            return None
        if kind.is_outdated and not self._ranks.shares(kind):
            self._make_again(kind)
            kind = self._kinds.latest or kind
        if kind.plan is None or kind.search is None:
            return kind.plan
        return replace(kind.plan, compared=str(kind.search))

    def settled_line(self) -> str | None:
        """Return, once, what the comparison of plans of the latest kind has come to."""
        kind = self._kinds.latest
        if kind is None or kind.search is None or not kind.search.is_settled:
            return None
        if kind.search.is_told:
            return None
        kind.search.is_told = True
        return f"stormd: of the plans that steps have followed: {kind.search}"

    def plans_for(self, budgets: Iterable[Budget]) -> list[Plan]:
        """Return what each budget would give the latest kind, which keeps its own; none before."""
        kind = self._kinds.latest
        if kind is None:
            return []
        problem = self._problem(kind)
        machine = self._machine(kind)
        return [
            Plan.of(
                problem,
                choose(problem, machine, budget_bytes=self._room(budget, kind)),
            )
            for budget in budgets
        ]

    def ratio(self) -> float:
        """Return how well tensors have been compressed so far."""
        return self._ratio()

    @property
    def devices(self) -> Sequence[torch.device]:
        """The GPUs that values of the latest step signature lie on."""
        kind = self._kinds.latest
        return () if kind is None else kind.devices

    def _make_again(self, kind: Kind) -> None:
        """Make the plan of a kind; one without functions follows what is chosen with them."""
        with self._making:
            if not kind.is_outdated:
                return  # another thread has done so
            if kind.origin is None:
                self._make(kind)
                return
            kind.is_outdated = False
            is_latest = kind is self._kinds.latest
            self._make(self._kinds.prefer(kind.origin) if is_latest else kind.origin)

    def _room(self, budget: Budget, kind: Kind) -> int:
        """Return how many bytes may stay of a step of a kind."""
        if budget == "least":
            return 0
        if budget == "fit":
            room = free_bytes(kind.devices)
        else:
            room = int(budget * kind.saved_bytes) if isinstance(budget, float) else budget
        return max(0, room - self._short)

    def _machine(self, kind: Kind) -> Machine:
        """Return the figures that plans of a kind are made from; while some are compared, its own.

        Those of the link are what it did in the steps so far.
        """
        if kind.machine is not None and kind.search is not None:
            return kind.machine
        device = kind.clock or _HOST
        kind.machine = machine_of(device).with_link(self._link(device)).compressing(self._ratio())
        return kind.machine

    def _make(self, kind: Kind) -> None:
        problem = self._problem(kind)
        machine = self._machine(kind)
        self._check_budget(problem)
        choice = self._choice(kind, problem, machine, self._asked_room(kind))
        self._follow(kind, problem, choice, machine.measured)
        if kind.has_functions and not kind.has_replays:
            self._go_on_without_functions(kind)

    def figures(self, kind: Kind, steps: Sequence[float | None]) -> Figures:
        """Return what a plan of a kind is to be made from, for other ranks; see `Planner`.

        Raises:
            UsageError: the budget cannot be kept.
        """
        kind.is_outdated = False  # what is learned from here on is told in the next round
        with self._making:
            problem = self._problem(kind)
        self._check_budget(problem)
        machine = self._machine(kind)
        return Figures.of(problem, machine, self._asked_room(kind), steps)

    def decide(self, kind: Kind, slowest: Figures, followed: Alternative | None) -> Agreed:
        """Return what the next steps of all ranks are to follow; see `Planner`."""
        kind.grow(dict(enumerate(slowest.nbytes)))
        search = kind.search
        if search is None:
            kind.machine = slowest.machine
        elif followed is not None:
            for seconds in slowest.steps:
                if search.took(followed, seconds):
                    break
        problem, machine = slowest.put_into(self._problem(kind)), kind.machine or slowest.machine
        choice = self._choice(kind, problem, machine, slowest.room)
        nbytes = tuple(value.nbytes for value in problem.values)
        return Agreed(choice, kind.search, machine.measured, nbytes)

    def follow_agreed(self, kind: Kind, agreed: Agreed, *, leads: bool) -> None:
        """Have the next step of a kind follow what ranks have agreed on; see `Planner`."""
        latest, news, choice = self._kinds.latest, kind.is_outdated, agreed.choice
        kind.grow(dict(enumerate(agreed.nbytes)))
        if latest is not None and latest.origin is kind:
            kind = self._kinds.prefer(kind)
        problem = self._problem(kind)
        if not leads and agreed.search is not None:
            agreed.search.is_told = kind.search is not None and kind.search.is_told
            kind.search = agreed.search
            kind.search.follows(staying_bytes(problem, choice))
            kind.compared[kind.search.current] = choice.decisions
        self._follow(kind, problem, choice, agreed.measured)
        kind.is_outdated = news
        kind.times.forget_steps()
        self._thread.followed = None  # that step has followed another plan
        if kind.has_functions and not kind.has_replays:
            other = self._kinds.prefer(kind.without_functions())
            other.search = kind.search
            numbers = saved_numbers(kind.events)
            other.grow({new: kind.values[old].nbytes for new, old in enumerate(numbers)})
            problem = self._problem(other)
            self._follow(other, problem, _of_saved(choice, kind), agreed.measured)

    def _check_budget(self, problem: Problem) -> None:
        largest = max((value.nbytes for value in problem.saved), default=0)
        budget = self.options.budget
        if type(budget) is int and budget < largest:
            given, needed = format_apart(budget, largest)
            raise UsageError(
                f"budget is {given}, and the largest tensor of a step has {needed}, which is the "
                "least possible; raise it, or pass budget='least'"
            )

    def _follow(
        self, kind: Kind, problem: Problem, choice: Choice, measured: frozenset[str]
    ) -> None:
        """Have the next step of a kind follow a choice."""
        kind.follow(choice.decisions)
        plan = Plan.of(problem, choice, measured)
        kind.plan, kind.told = self._beside_checkpointing(kind, plan), None

    def _beside_checkpointing(self, kind: Kind, plan: Plan) -> Plan:
        """Return a plan that says what checkpointing would keep; with "least" no more is held."""
        most, held = kind.checkpointed_bytes, None
        if most is not None and self.options.budget == "least":
            held = max(0, most - plan.bytes_by_decision["keep"])
        return replace(plan, checkpointed_bytes=plan.checkpointed_bytes or most, turn_bytes=held)

    def _choice(self, kind: Kind, problem: Problem, machine: Machine, room: int | None) -> Choice:
        """Return the choice that the next steps of a kind follow, of those that are compared.

        `room` is how many bytes may be kept; None where as few as possible are to.
        """
        if kind.search is None and kind.is_on_gpu and kind.times.window is not None:
            kind.search = _search(kind, problem, is_least=self.options.budget == "least")
        search = kind.search
        if search is None:
            return choose_alternative(PREDICTED, problem, machine, room=room)
        while True:
            choice = choose_alternative(search.current, problem, machine, room=room)
            if search.is_settled or kind.origin is not None:
                break
            like = kind.measured_like(choice.decisions)
            if like is not None:
                search.is_like(like)
            elif not search.rules_out(choice.link_seconds):
                break
        kind.compared[search.current] = choice.decisions
        if kind.origin is None:
            search.follows(staying_bytes(problem, choice))
        return choice

    def _asked_room(self, kind: Kind) -> int | None:
        """Return how many bytes may be kept of a kind; None where as few as possible are to."""
        budget = self.options.budget
        return None if budget == "least" else self._room(budget, kind)

    def _problem(self, kind: Kind) -> Problem:
        """Return what the planner is told of a kind, waiting until its passes are timed.

        With "least" no more stays at the end of the forward pass than checkpointing would keep.
        Nothing is recomputed where nobody watches its functions.
        """
        switched_off = "" if self.options.replays else _SWITCHED_OFF
        problem = kind.problem(
            recomputes=kind.has_functions and not self._runs_compiled_code,
            why_not=_COMPILED if self._runs_compiled_code else switched_off,
        )
        last, most = problem.last_bytes, kind.checkpointed_bytes
        if most is not None and self.options.budget == "least":
            last = min(last, most)
        return replace(problem, last_bytes=max(0, last - self._short))

    def _go_on_without_functions(self, kind: Kind) -> None:
        """Have the next step be expected to be of a kind, whose functions nobody watches now."""
        other = self._kinds.prefer(kind.without_functions())
        other.search = kind.search
        self._make(other)

    def _free_pins(self) -> None:
        """Free what steps have known storages by, of whose results nothing is left."""
        for _ in range(len(self._pinned)):
            reference, storages = self._pinned.popleft()
            if reference() is not None:
                self._pinned.append((reference, storages))
                continue
            while storages:
                storages.pop().free()


class _FollowedStep(NamedTuple):
    """A step whose block has ended, and that has followed a plan."""

    times: StepTimes
    alternative: Alternative
    begun: Mark
    is_compared: bool
    """Whether it was as large as the others that are."""


class PlannedStep:
    """One step, in the thread of its block."""

    def __init__(
        self,
        planning: Planning,
        recording: Recording,
        mode: Recorder | None,
        begun: Mark,
        *,
        fills: bool,
        counts: bool,
        compiled: _follow.Script | None,
        calls: _follow.CallLog | None,
        launches: LaunchWatch | None,
    ) -> None:
        """Follow what `recording` says.

        `fills` tells that the device's queue is kept full in its forward pass, `counts` that later
        steps by the same plan will take as long.
        """
        self._planning = planning
        self._begun = begun
        self._began = perf_counter()
        self._fills = fills
        self._counts = counts
        self._is_trial = False
        self.recording: Recording | None = recording
        """What says what becomes of a saved tensor; None once the block has ended."""
        self._step = recording.step
        self._proofs: deque[Trial | ReadyTrial] = deque()
        self._compiled = compiled
        self._calls = calls
        self.launches = launches
        """What tells of the launches of a step that Python follows."""
        self._followed = None if compiled is None else recording.step.script
        """The script that compiled code follows."""
        if compiled is not None and self._step.kind is not None:
            self._step.is_followed = self._step.kind.has_replays
        self.mode = mode
        self.verifies = planning.options.verifies
        self.budget = planning.options.budget

    @property
    def script(self) -> _follow.Script | None:
        """What compiled code may follow from here on; None where Python has to."""
        return self._compiled

    @property
    def watcher(self) -> _follow.CallLog | None:
        """What notes the calls of a step that Python follows, for compiled code to follow it."""
        return self._calls

    @property
    def has_launches(self) -> bool:
        """Whether steps of its expected kind launch kernels that compiled code is to be told of."""
        kind = self._step.kind
        return kind is not None and kind.has_replays and kind.has_launches

    @property
    def device(self) -> torch.device:
        """On which most values of its expected kind lie."""
        kind = self._step.kind
        return _HOST if kind is None else kind.clock or _HOST

    def layer_of(self, position: int) -> str:
        """Return in which layer the value of an event of the script is made."""
        return "" if self._followed is None else self._followed[position].value.layer

    def pack_input(self, tensor: torch.Tensor, number: int) -> Any:
        """Hold a value that others are to be made from; see Recording."""
        return None if self.recording is None else self.recording.pack_input(tensor, number)

    def note_made(self, number: int, tensor: torch.Tensor) -> None:
        """Note from when on the bytes are there of a value that will leave; see Recording."""
        if self.recording is not None:
            self.recording.note_made(number, tensor)

    def stand_at(self, position: int) -> None:
        """Note that so many events of the script have happened, as compiled code has seen."""
        if self._step.script is self._followed:
            self._step.stand_at(position)

    def leave(self) -> None:
        """Note that the step is no more what compiled code has followed it as.

        Nobody has watched its functions: if that was to be done, nothing is learned from it.
        """
        kind = self._step.kind
        if self._followed is None or kind is None or not kind.has_replays:
            return
        self._step.stop()
        kind.rests = LONG_ENOUGH << min(kind.parted, MOST_DOUBLED)
        kind.parted += 1

    def note_sizes(self, handed_over: int, larger: Iterable[tuple[int, int]]) -> None:
        """Note what compiled code has seen of sizes; see `StepRecord`."""
        self._step.handed_over += handed_over
        self._step.larger.update(larger)

    @property
    def position(self) -> int:
        """How many events of the script that compiled code follows have happened.

        -1 where the step has left that.
        """
        return self._step.count if self._step.script is self._followed else -1

    @property
    def is_news(self) -> bool:
        """Whether no session has been told of the plan that the step is expected to follow."""
        kind = self._step.kind
        return kind is not None and (kind.told is None or kind.told() is None)

    def news_for(self, session: object) -> Plan | None:
        """Return the plan that the step follows, unless it was asked for by this session before."""
        kind = self._step.kind
        if kind is None or kind.plan is None or (kind.told and kind.told() is session):
            return None
        kind.told = weakref.ref(session)
        return kind.plan

    def trial(self, number: int, nbytes: int) -> Trial | None:
        """Return what is to be noted of a value that has not proved itself; None if it has."""
        kind = self._step.kind
        if kind is None or kind.is_proved(number, nbytes):
            return None
        self._is_trial |= kind.goes_on_trying(number)
        return Trial(kind, number, kind.ways[number], nbytes)

    def trial_at(self, position: int, nbytes: int) -> Trial | None:
        """Return the same of an event of the script that compiled code follows."""
        followed = self._followed
        return None if followed is None else self.trial(followed[position].value.number, nbytes)

    def end(self) -> Kind | None:
        """Learn from the step; nothing runs or is saved in it any more.

        Returns the kind whose plan the forward pass has followed to its end.
        """
        followed = None
        if self.recording is not None:
            kind = self._step.kind
            noted = self.recording.noted()
            if noted is not None and kind is not None and self._step.script is kind.script:
                kind.native.noted = noted
            is_trial = self._is_trial or self.recording.tries
            followed = self._planning.ended(
                self._step,
                self._begun,
                least=self.recording.least,
                pass_seconds=perf_counter() - self._began,
                is_trial=is_trial,
                fills=self._fills,
                counts=self._counts,
            )
        self.abandon()
        return followed

    @property
    def has_parted(self) -> bool:
        """Whether the step did in its middle what was not expected of its kind."""
        return self._step.has_parted

    def prove(self, trial: Trial | ReadyTrial) -> None:
        """Note that a trial has found the same bits, once the step has ended as its kind does.

        One that does something else may write uncounted where that kind does not, or the reverse.
        """
        self._proofs.append(trial)
        if self.recording is None:
            self._note_proofs()

    def _note_proofs(self) -> None:
        with suppress(IndexError):  # several backward threads may be at it
            while True:
                trial = self._proofs.popleft()
                if trial.kind is self._step.ended_as:
                    trial.succeed()

    def abandon(self) -> None:
        """Forget what the step has done so far; nothing runs or is saved in it any more."""
        recording, self.recording = self.recording, None
        self._note_proofs()
        if self.mode is not None:
            self.mode.end()
            if self.mode.meets_compiled_code:
                self._planning.met_compiled_code()
        if recording is not None:
            recording.end()


def _pack_input(
    step: StepRecord,
    pack: Callable[[torch.Tensor, Decision, str], Any],
    tensor: torch.Tensor,
    number: int,
) -> Any:
    decision = step.decided(number, tensor.untyped_storage().nbytes())
    return pack(tensor, decision, step.layer(number))


def _little_bytes(kind: Kind) -> float:
    """Return what is not worth a longer step; 0 where the device has no memory of its own."""
    return LITTLE * device_bytes(kind.devices)


def _search(kind: Kind, problem: Problem, *, is_least: bool) -> PlanSearch:
    """Return a comparison of plans for a kind whose forward pass has been timed.

    With the budget "least" half of what the device computes in a forward pass more is worth it if
    less stays: to checkpoint takes all of that more. Not of what is little.
    """
    if is_least and kind.saved_bytes <= _little_bytes(kind):
        return PlanSearch((ALL_STAYS, OFFLOAD_ALONE), slack_bytes=kind.saved_bytes)
    blocks = AS_BLOCKS if is_least and problem.checkpointed_bytes else ()
    return PlanSearch(
        (*blocks, OFFLOAD_ALONE),
        allowance=(problem.forward_seconds or 0.0) / 2 if is_least else 0.0,
        slack_bytes=max(problem.last_bytes, kind.checkpointed_bytes or 0),
    )


def _of_saved(choice: Choice, kind: Kind) -> Choice:
    """Return a choice of a kind for the same one without its functions."""
    numbers = saved_numbers(kind.events)
    return choice._replace(
        decisions=[choice.decisions[number] for number in numbers],
        reasons=[choice.reasons[number] for number in numbers],
        costs=[choice.costs[number] for number in numbers],
    )
