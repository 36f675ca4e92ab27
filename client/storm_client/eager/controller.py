"""Runs the steps of an Offload by plans: learns step signatures and verifies recomputation.

The first step of a signature offloads everything, and is watched and timed. The next step follows
the plan made from it, but also offloads what it recomputes, and compares both. A value whose bits
differ once is never recomputed. Later steps offload no recomputed value any more. What a step has
shown goes into a new plan when the next step begins.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from storm_client.eager.following import compiled
from storm_client.eager.function_modes import is_in_compiled_code
from storm_client.eager.launches import watch_launches
from storm_client.eager.marks import Mark
from storm_client.eager.operation_times import OperationTimes, keep_busy
from storm_client.eager.operations import REPLAYABLE
from storm_client.eager.plan_maker import PlanMaker, PlanOptions
from storm_client.eager.planned_step import PlannedStep
from storm_client.eager.ranks import Ranks
from storm_client.eager.recognition import Recurrence, StepRecord, StepSignatures
from storm_client.eager.recorder import Recorder
from storm_client.eager.recording import Recording
from storm_client.eager.signature import NEAR_LARGEST, StepSignature
from storm_client.eager.values import SaveHooks
from storm_client.monitoring.layers import Layers
from storm_client.planner.in_flight import give_back_unused
from storm_client.planner.machine import TransferFigures
from storm_client.planner.plan import Plan
from storm_client.planner.search import Alternative
from storm_client.planner.shortage import shortage_bytes
from stormd.protocol import Budget

if TYPE_CHECKING:
    from storm_client.eager.followed_plan import FollowedPlan
    from storm_client.eager.recompute import Pins
    from storm_client.eager.step_times import StepTimes
    from storm_client.monitoring.native_counts import NativeCounts
    from storm_client.native import Native, _follow
    from storm_client.saved.ranges import WeakStorage

__all__ = ["Planning"]

DIVISOR_STEP: Final = 8
"""Divides the minimum tensor size where steps differ only in whether some tensors are too small."""

MAX_DIVISOR: Final = 64
"""The largest total divisor."""

NEAR: Final = 16
"""Times the minimum size: a tensor up to this size may be below the minimum in a shorter step."""

GRADLESS: Final = 1 / 50
"""Share of a step's saved bytes, above which results without gradients are recomputed as well. They
are what the first block makes of a batch, as the features of a graph's edges."""

LOOK_EVERY: Final = 8
"""Once plans are settled, one step in so many looks for news: step times, link, gradients."""

MAX_BY_PYTHON: Final = 4
"""Steps to wait for compiled code before steps that Python follows are compared as well."""


class Planning:
    """The step signatures of one Offload, and their plans. Threads may share it."""

    def __init__(
        self,
        options: PlanOptions,
        ratio: Callable[[], float],
        layers: Layers,
        link: Callable[[torch.device], TransferFigures],
        latest_figures: Callable[[torch.device], TransferFigures],
    ) -> None:
        """Start without known signatures; `layers` returns the layer in which a value is made.

        For the other arguments see PlanMaker.
        """
        self.options = options
        self.ratio = ratio
        self._layers = layers
        self._functions = REPLAYABLE | options.functions
        self._signatures = StepSignatures()
        self.maker = PlanMaker(options, ratio, link, latest_figures)
        self._pinned: deque[tuple[weakref.ref[Pins], list[WeakStorage]]] = deque()
        """Each step's pins, and their weak storages, to be freed once the pins are gone."""
        self._operations = OperationTimes()
        self._size_divisor = 1
        """Divides the user's minimum tensor size."""
        self._counts_gradless = False
        """Whether results without gradients are values of a step, so that they are recomputed."""
        self._recurrence = Recurrence()
        self._ranks = Ranks((options.budget, options.verifies, options.replays), options.functions)
        self._steps = 0
        """Steps since it was last looked for news of plans."""
        self._thread = threading.local()
        """For each thread: whether a block of it has ended, and the plan that its last followed."""

    # --- a step -----------------------------------------------------------------------------

    def min_bytes(self, asked: int) -> int:
        """Return the minimum size in bytes of a tensor that is not always kept.

        It is below `asked` where steps of several sizes would otherwise have different
        signatures, so that compiled code could not follow them.
        """
        return max(1, asked // self._size_divisor)

    def begin(
        self,
        min_bytes: int,
        hooks: SaveHooks,
        *,
        counts: NativeCounts | None = None,
        follow: Native | None = None,
    ) -> PlannedStep:
        """Begin a step that handles tensors of at least `min_bytes` bytes, and offloads by `hooks`.

        Compiled code may follow the step where there are `counts` of its work. `follow` is the
        compiled module if there is one: only with it are random draws and kernel launches seen.

        Raises:
            UsageError: the budget cannot be kept.
        """
        self._free_pins()
        now = self._note_step()
        record, watches, is_late = self._expected_step()
        signature = record.signature
        fills = signature is not None and signature.wants_full_queue
        script = None if counts is None or fills else self._script(record, follow, counts)
        watches = watches and script is None
        logs_events = watches and counts is not None and self._logs_events(record)
        calls = None
        if watches and follow is not None:
            calls = follow.CallLog(min_bytes, logs_events, self._counts_gradless)
        start_recording = partial(
            self._recording,
            record,
            min_bytes,
            hooks,
            calls=calls,
            logs_events=logs_events,
        )
        step = PlannedStep(
            self,
            record,
            min_bytes,
            start_recording,
            self._begun(signature, None if is_late else now, fills=fills),
            fills=fills,
            counts=counts is None or script is not None or _stays_by_python(record.plan),
            script=script,
            watcher=calls,
        )
        if watches and (recording := step.recording) is not None:
            step.mode = self._recorder(recording, follow)
            step.launches = watch_launches(follow, step.mode)
        return step

    def _recording(
        self,
        record: StepRecord,
        min_bytes: int,
        hooks: SaveHooks,
        *,
        calls: _follow.CallLog | None,
        logs_events: bool,
    ) -> Recording:
        """Return a recording of a step; see its constructor."""
        recording = Recording(
            record,
            min_bytes,
            hooks,
            functions=self._functions,
            layers=self._layers,
            times=self._operations,
            calls=calls,
            logs_events=logs_events,
            counts_gradless=self._counts_gradless,
        )
        self._pinned.append((weakref.ref(recording.pins), recording.pins.storages))
        return recording

    def _expected_step(self) -> tuple[StepRecord, bool, bool]:
        """Return the record of a step of the expected signature, and whether to watch functions.

        The third result is whether this took long: plans were made, or memory given back.
        """
        learns = self._recurrence.is_seen
        with self.maker.lock:
            is_late = self._make_plans(learns=learns)
        signature = self._signatures.expected
        if signature is not None and signature.is_on_gpu:
            if signature.settles():
                give_back_unused(signature.devices)
                is_late = True
        elif not self._has_run_here():
            signature = None
        watches = self._is_watched(signature, learns=learns)
        learns = learns and (watches or bool(self.maker.why_not))
        may_follow_script = signature is not None and signature.has_functions == watches
        record = StepRecord(
            self._signatures, signature, may_follow_script=may_follow_script, is_learned=learns
        )
        return record, watches, is_late

    def _has_run_here(self) -> bool:
        """Return whether a block of this thread has ended.

        On a CPU a thread's first operations may run with more OpenMP threads than later ones, so
        their results cannot be recomputed. PyTorch passes its thread count to OpenMP only in the
        first operation that it runs on several threads.
        """
        return getattr(self._thread, "has_run", False)

    def _is_watched(self, signature: StepSignature | None, *, learns: bool) -> bool:
        """Return whether to watch the functions of a step that is expected to be of a signature.

        They are watched where something is or may be recomputed. While nearly every step has a new
        signature, steps of a signature without a plan are not watched.
        """
        if not self.maker.why_not and is_in_compiled_code():
            self.maker.met_compiled_code()
        if self.maker.why_not:
            return False
        return signature is None or (learns if signature.followed is None else signature.may_replay)

    def _script(
        self, record: StepRecord, follow: Native, counts: NativeCounts
    ) -> _follow.Script | None:
        """Return the script for compiled code from the step's begin; None if Python follows it."""
        signature, plan = record.signature, record.plan
        if signature is None or plan is None or record.script is not plan.script:
            return None
        if self.options.verifies:
            return None
        if signature.fallback.steps > 0:
            signature.fallback.steps -= 1
            return None
        evidence, gradless = signature.evidence, self._counts_gradless
        return compiled(plan, evidence, follow, counts, counts_gradless=gradless)

    def _logs_events(self, record: StepRecord) -> bool:
        """Return whether the calls of a step have to be recorded for compiled code."""
        plan = record.plan
        if plan is None or record.script is None or self.options.verifies:
            return False
        return not plan.logged

    def _recorder(self, recording: Recording, follow: Native | None) -> Recorder:
        """Return a mode that watches the functions of a step, and times those of an unknown one."""
        note_draw = None if follow is None else follow.note_draw
        measures = recording.step.signature is None
        return Recorder(recording, self._operations, measures=measures, note_draw=note_draw)

    def _begun(self, signature: StepSignature | None, now: Mark | None, *, fills: bool) -> Mark:
        """Return the mark of a step's begin on its device, which may be `now`.

        `fills` first keeps the device busy.
        """
        clock = None if signature is None else signature.clock
        if fills and signature is not None and clock is not None:
            with torch.cuda.device(clock):
                keep_busy(signature.times.pass_seconds)
        elif now is not None and now.device == clock:
            return now
        return Mark(clock)

    def _note_step(self) -> Mark | None:
        """Record the time of this thread's previous step, as the next step begins.

        Making plans for the next step is not counted. Return the mark of its end if it was timed.
        """
        followed: _FollowedStep | None = getattr(self._thread, "followed", None)
        self._thread.followed = None
        if followed is None:
            return None
        span = followed.begun.until_now() if followed.is_compared else None
        followed.times.record_step(followed.alternative, span)
        return None if span is None else span.end

    def ended(self, step: PlannedStep, *, pass_seconds: float, tries: bool) -> StepSignature | None:
        """Learn from a step that has ended; return its signature if it has followed its plan.

        `pass_seconds` is the length of its forward pass by the host's clock. A step that `tries`
        something takes longer than others, so its time does not count.
        """
        record = step.record
        followed = record.signature
        self._thread.has_run = True
        record.ended_as = signature = self._signatures.ended(record)
        if record.count:  # a validation step saves nothing
            self._recurrence.count_step(is_new=signature is None or signature.seen == 1)
        if signature is not None:
            signature.note_loss(record.plain_loss)
            signature.note_gradients(record.gradients)
            self._ranks.ended(signature)
            if signature.seen == 1:
                self._learn_anew_if(signature, step.min_bytes)
        if signature is None or signature is not followed or signature.followed is None:
            return None
        signature.times.pass_seconds = pass_seconds
        if tries:
            return None
        share = signature.share(record.saved_bytes_with_repeats)
        if step.fills:
            signature.times.record_full_queue(step.begun.until_now(), share)
            return None
        signature.observe(step.begun, share, by_python=not step.counts)
        if signature.comparison is not None and step.counts:
            is_compared = share >= NEAR_LARGEST
            current = signature.comparison.search.current
            self._thread.followed = _FollowedStep(signature.times, current, step.begun, is_compared)
        return signature

    def _learn_anew_if(self, signature: StepSignature, min_bytes: int) -> None:
        """Look at more results and learn anew, if a new signature shows that this is needed.

        At smaller tensors, if it differs only by small ones. At results without gradients, if such
        results are a part of what it saves.
        """
        looks_at_smaller = (
            min_bytes > 1
            and self._size_divisor < MAX_DIVISOR
            and self._signatures.has_except_small(signature, NEAR * min_bytes)
        )
        gradless_bytes = sum(one.nbytes for one in signature.values if one.is_saved_gradless)
        looks_at_gradless = (
            not self._counts_gradless and gradless_bytes > GRADLESS * signature.saved_bytes
        )
        if looks_at_smaller or looks_at_gradless:
            self._size_divisor *= DIVISOR_STEP if looks_at_smaller else 1
            self._counts_gradless |= looks_at_gradless
            self._signatures, self._recurrence = StepSignatures(), Recurrence()

    def _free_pins(self) -> None:
        """Free the weak storages of steps whose results are all freed."""
        for _ in range(len(self._pinned)):
            try:
                reference, storages = self._pinned.popleft()
                if reference() is not None:
                    self._pinned.append((reference, storages))
                    continue
                while storages:
                    storages.pop().free()
            except IndexError:
                return  # another thread has taken the last

    # --- plans ------------------------------------------------------------------------------

    def _make_plans(self, *, learns: bool) -> bool:
        """Remake plans that have new information, and make first ones if steps are learned.

        Return whether there were any.
        """
        if (latest := self._signatures.latest) is not None:
            self._note_shortage(latest)
            self._steps += 1
            if self._steps >= LOOK_EVERY or not latest.is_settled or self._ranks.are_sharing:
                self._compare_plans(latest)
                self._note_link(latest, self._steps)
                latest.look_for_gradients()
                self._steps = 0
        if self._ranks.are_sharing:
            self._ranks.agree(self.maker, self._expect)
        outdated = self._signatures.outdated()
        for signature in outdated:
            may_be_planned = signature.followed is not None or (learns and signature.is_learned)
            if may_be_planned and not self._ranks.shares(signature):
                self._make_again(signature)
        return bool(outdated) or self._ranks.are_sharing

    def _compare_plans(self, latest: StepSignature) -> None:
        """Have the latest signature follow another plan where the steps' times call for that."""
        comparison = latest.comparison
        if comparison is None:
            return
        if self._ranks.shares(latest):
            self._ranks.record_times(latest, latest.times.known_steps())
        elif comparison.record_times(latest.times):
            latest.outdate()

    def _note_link(self, latest: StepSignature, steps: int) -> None:
        """Have the latest signature follow a new plan where its link has another speed by now.

        `steps` have begun since the last call.
        """
        if not self.maker.has_another_link(latest.root, steps):
            return
        if latest.comparison is not None and not self._ranks.shares(latest):
            latest.comparison.start_again(self.maker.measured(latest))
        latest.outdate()

    def _note_shortage(self, latest: StepSignature) -> None:
        """Have plans made anew, with less memory, where a device has run out of memory since."""
        short = shortage_bytes(latest.devices)
        if short != self.maker.lacked_bytes:
            self.maker.lacked_bytes = short
            self._signatures.outdate()

    def _make_again(self, signature: StepSignature) -> None:
        """Make the plan of a signature and of its root, unless another thread has done so."""
        with self.maker.lock:
            if signature.is_outdated:
                self._make(signature.root)

    def _make(self, signature: StepSignature) -> None:
        self._expect(signature, self.maker.make(signature))

    def _expect(self, signature: StepSignature, planned: StepSignature) -> None:
        """Expect the next step to be of `planned`, the signature that a new plan is for."""
        latest = self._signatures.latest
        if planned is not signature or (latest is not None and latest.root is signature):
            self._signatures.prefer(planned)

    # --- for people -------------------------------------------------------------------------

    @property
    def devices(self) -> Sequence[torch.device]:
        """The GPUs that hold values of the latest step signature."""
        signature = self._signatures.latest
        return () if signature is None else signature.devices

    def plan(self) -> Plan | None:
        """Return the plan of the latest signature."""
        signature = self._signatures.latest
        if signature is not None and signature.is_outdated and not self._ranks.shares(signature):
            self._make_again(signature)
            signature = self._signatures.latest or signature
        plan = None if signature is None or signature.followed is None else signature.followed.shown
        if plan is None or signature is None or signature.comparison is None:
            return plan
        return replace(plan, compared=str(signature.comparison.search))

    def plans_for(self, budgets: Iterable[Budget]) -> list[Plan]:
        """Return the plan for each budget for the latest signature, which keeps its own plan."""
        signature = self._signatures.latest
        return [] if signature is None else self.maker.plans_for(budgets, signature.root)

    def settled_line(self) -> str | None:
        """Return, once, the result of comparing the plans of the latest signature."""
        if self._steps:
            return None  # the step that has just begun has looked for no news
        signature = self._signatures.latest
        if signature is None or signature.comparison is None or signature.followed is None:
            return None
        line, shown = signature.comparison.line(), signature.followed.shown
        return line if line is None or shown is None else f"{line}: {shown.in_short()}"

    def is_comparing(self) -> bool:
        """Return whether steps follow several plans now, or will, to find the best."""
        signature = self._signatures.latest
        if signature is None or not signature.is_on_gpu:
            return False
        return not signature.is_settled


def _stays_by_python(plan: FollowedPlan | None) -> bool:
    """Return whether Python has followed so many steps of a plan that the next ones count."""
    return plan is not None and plan.by_python >= MAX_BY_PYTHON


class _FollowedStep(NamedTuple):
    """A step that has followed a plan and whose block has ended."""

    times: StepTimes
    alternative: Alternative
    begun: Mark
    is_compared: bool
    """Whether it was large enough for its time to be compared."""
