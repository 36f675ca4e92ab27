"""Has the steps of an Offload follow plans: learns their signatures, has replays tried.

The first step of a signature offloads all, and is watched and timed. The next follows the plan that
is made of it, but hands over, too, what it recomputes, and compares: a value whose bits differ once
is never recomputed. From then on nothing is handed over twice. What was learned in between makes
the plan anew where the next step begins.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from storm_client.eager.following import NativePath, compiled
from storm_client.eager.function_modes import is_in_compiled_code
from storm_client.eager.launches import watch_launches
from storm_client.eager.operation_times import OperationTimes, keep_busy
from storm_client.eager.operations import REPLAYABLE
from storm_client.eager.plan_maker import PlanMaker, PlanOptions
from storm_client.eager.planned_step import PlannedStep
from storm_client.eager.ranks import Ranks
from storm_client.eager.recognition import Recurrence, StepRecord, StepSignatures
from storm_client.eager.recorder import Mark, Recorder
from storm_client.eager.recording import Recording
from storm_client.eager.signature import NEAR_LARGEST, StepSignature
from storm_client.eager.values import SaveHooks
from storm_client.monitoring.layers import Layers
from storm_client.planner.in_flight import give_back_unused
from storm_client.planner.machine import LinkFigures
from storm_client.planner.plan import Plan
from storm_client.planner.search import Alternative
from storm_client.planner.shortage import lacked
from stormd.protocol import Budget

if TYPE_CHECKING:
    from storm_client.eager.recompute import Pins
    from storm_client.eager.step_times import StepTimes
    from storm_client.native import Native, _follow
    from storm_client.saved.ranges import WeakStorage

__all__ = ["Planning"]

FINER: Final = 8
"""By how much smaller tensors are handled where many steps differ by whether some are too small."""

FINEST: Final = 64
"""By how much at the most."""

NEAR: Final = 16
"""Times the least bytes: what is as small may be too small in a step that is shorter by as much."""

MOST_BY_PYTHON: Final = 4
"""Steps for which compiled code is waited for before those that Python follows are compared."""


class Planning:
    """The step signatures of one Offload, and their plans. Threads may share it."""

    def __init__(
        self,
        options: PlanOptions,
        ratio: Callable[[], float],
        layers: Layers,
        link: Callable[[torch.device], LinkFigures],
        link_of_late: Callable[[torch.device], LinkFigures],
    ) -> None:
        """Start without experience; `layers` tells in which layer a value is made.

        For the others see PlanMaker.
        """
        self.options = options
        self.ratio = ratio
        self._layers = layers
        self._functions = REPLAYABLE | options.functions
        self._signatures = StepSignatures()
        self.maker = PlanMaker(options, ratio, link, link_of_late)
        self._pinned: deque[tuple[weakref.ref[Pins], list[WeakStorage]]] = deque()
        """What the steps know storages by, and what has to be freed when it has died."""
        self._operations = OperationTimes()
        self._finer = 1
        """By how much what is handled may be smaller than the user says."""
        self._recurrence = Recurrence()
        self._ranks = Ranks((options.budget, options.verifies, options.replays), options.functions)
        self._thread = threading.local()
        """Of each thread whether a block of it has ended, and what the last has followed."""

    # --- a step -----------------------------------------------------------------------------

    def least(self, min_bytes: int) -> int:
        """Return how many bytes a tensor needs to have in order not to stay.

        They are fewer than `min_bytes` where steps of several sizes would else differ in what they
        do, and no compiled code could follow them.
        """
        return max(1, min_bytes // self._finer)

    def begin(
        self,
        least: int,
        hooks: SaveHooks,
        *,
        native: NativePath | None = None,
        follow: Native | None = None,
    ) -> PlannedStep:
        """Begin a step, whose tensors of `least` bytes matter and are handed over by `hooks`.

        It is followed by compiled code where `native` can do that. `follow` is that code where it
        is there at all: what operations draw and launch is only seen with it.

        Raises:
            UsageError: the budget cannot be kept.
        """
        self._free_pins()
        self._note_step()
        record, watches = self._expected_step()
        signature = record.signature
        fills = signature is not None and signature.wants_full_queue
        script = None if native is None or fills else self._script(record, native)
        watches = watches and script is None
        is_noted = watches and self._is_noted(record, native)
        calls = follow.CallLog(least, is_noted) if watches and follow is not None else None
        recording = Recording(
            record,
            least,
            hooks,
            functions=self._functions,
            layers=self._layers,
            times=self._operations,
            calls=calls,
            is_noted=is_noted,
            leaves_early=not self.options.verifies,
        )
        self._pinned.append((weakref.ref(recording.pins), recording.pins.storages))
        mode = self._recorder(recording, follow) if watches else None
        plan = record.plan
        waits = native is not None and script is None
        return PlannedStep(
            self,
            recording,
            self._begun(signature, fills=fills),
            fills=fills,
            counts=not waits or (plan is not None and plan.by_python >= MOST_BY_PYTHON),
            script=script,
            watcher=calls,
            mode=mode,
            launches=None if mode is None else watch_launches(follow, mode),
        )

    def _expected_step(self) -> tuple[StepRecord, bool]:
        """Return the record of a step like the latest, and whether its functions are watched."""
        learns = self._recurrence.is_seen
        with self.maker.lock:
            self._make_plans(learns=learns)
        signature = self._signatures.expected
        if signature is not None and signature.is_on_gpu:
            if signature.settles():
                give_back_unused(signature.devices)
        elif not self._has_run_here():
            signature = None
        watches = self._is_watched(signature, learns=learns)
        learns = learns and (watches or bool(self.maker.why_not))
        walks = signature is not None and signature.has_functions == watches
        return StepRecord(self._signatures, signature, walks=walks, is_learned=learns), watches

    def _has_run_here(self) -> bool:
        """Tell whether a block of this thread has ended.

        On a CPU a thread's first operations may run with more threads than those behind them, so
        what they have made cannot be recomputed: PyTorch tells OpenMP its count in the first one
        that it shares among threads.
        """
        return getattr(self._thread, "has_run", False)

    def _is_watched(self, signature: StepSignature | None, *, learns: bool) -> bool:
        """Tell whether the functions of a step are watched that is expected to be of a signature.

        So they are where something is recomputed, or may be; of steps that no other is like they
        are not, until such steps come again.
        """
        if not self.maker.why_not and is_in_compiled_code():
            self.maker.met_compiled_code()
        if self.maker.why_not:
            return False
        return signature is None or (learns if signature.followed is None else signature.may_replay)

    def _script(self, record: StepRecord, native: NativePath) -> _follow.Script | None:
        """Return what compiled code may follow from the step's begin on."""
        signature, plan = record.signature, record.plan
        if signature is None or plan is None or record.script is not plan.script:
            return None
        if self.options.verifies:
            return None
        if signature.rest.steps > 0:
            signature.rest.steps -= 1
            return None
        return compiled(signature, plan, native.follow, native.counts)

    def _is_noted(self, record: StepRecord, native: NativePath | None) -> bool:
        """Tell whether the calls of a step have to be noted for compiled code."""
        plan = record.plan
        if native is None or plan is None or record.script is None or self.options.verifies:
            return False
        return not plan.noted

    def _recorder(self, recording: Recording, follow: Native | None) -> Recorder:
        """Return what sees the functions that a step runs, and times those of one not yet known."""
        note_draw = None if follow is None else follow.note_draw
        measures = recording.step.signature is None
        return Recorder(recording, self._operations, measures=measures, note_draw=note_draw)

    def _begun(self, signature: StepSignature | None, *, fills: bool) -> Mark:
        """Mark a step's begin on its device, whose queue is filled before if it `fills` that."""
        clock = None if signature is None else signature.clock
        if fills and signature is not None and clock is not None:
            with torch.cuda.device(clock):
                keep_busy(signature.times.pass_seconds)
        return Mark(clock)

    def _note_step(self) -> None:
        """Note what the step took that this thread has begun before: the next begins.

        To make plans for that is no part of it.
        """
        followed: _FollowedStep | None = getattr(self._thread, "followed", None)
        self._thread.followed = None
        if followed is not None:
            span = followed.begun.until_now() if followed.is_compared else None
            followed.times.took(followed.alternative, span)

    def ended(
        self, step: PlannedStep, *, least: int, pass_seconds: float, tries: bool
    ) -> StepSignature | None:
        """Learn from a step that has ended; return its signature if it has followed its plan.

        What has `least` bytes was looked at. `pass_seconds` is how long its forward pass was by the
        host's clock. One that `tries` something takes longer than others.
        """
        record = step.record
        followed = record.signature
        self._thread.has_run = True
        record.ended_as = signature = self._signatures.ended(record)
        if record.count:  # not of a validation, which saves nothing
            self._recurrence.saw(is_new=signature is None or signature.seen == 1)
        if signature is not None:
            signature.note_loss(record.plain_loss_bytes)
            signature.note_gradients(record.gradients)
            self._ranks.ended(signature)
            if signature.seen == 1 and self._finer < FINEST:
                self._look_finer(signature, least)
        if signature is None or signature is not followed or signature.followed is None:
            return None
        signature.times.pass_seconds = pass_seconds
        if tries:
            return None
        share = signature.share(record.handed_over)
        if step.fills:
            signature.times.filled(step.begun.until_now(), share)
            return None
        signature.observe(step.begun.until_now(), share, by_python=not step.counts)
        if signature.comparison is not None and step.counts:
            is_compared = share >= NEAR_LARGEST
            current = signature.comparison.search.current
            self._thread.followed = _FollowedStep(signature.times, current, step.begun, is_compared)
        return signature

    def _look_finer(self, signature: StepSignature, least: int) -> None:
        """Handle smaller tensors, and learn anew, if a new signature differs by those alone."""
        if least > 1 and self._signatures.has_but_for(signature, NEAR * least):
            self._finer *= FINER
            self._signatures, self._recurrence = StepSignatures(), Recurrence()

    def _free_pins(self) -> None:
        """Free what steps have known storages by, of whose results nothing is left."""
        with suppress(IndexError):  # another thread may have taken the last
            for _ in range(len(self._pinned)):
                reference, storages = self._pinned.popleft()
                if reference() is not None:
                    self._pinned.append((reference, storages))
                    continue
                while storages:
                    storages.pop().free()

    # --- plans ------------------------------------------------------------------------------

    def _make_plans(self, *, learns: bool) -> None:
        """Make anew the plans of which more is known by now, and new ones if steps are learned."""
        self._compare_plans()
        self._note_link()
        self._note_shortage()
        if (latest := self._signatures.latest) is not None:
            latest.look_for_gradients()
        if self._ranks.are_sharing:
            self._ranks.agree(self.maker, self._expect_agreed)
        for signature in self._signatures.outdated():
            may_be_planned = signature.followed is not None or (learns and signature.is_learned)
            if may_be_planned and not self._ranks.shares(signature):
                self._make_again(signature)

    def _compare_plans(self) -> None:
        """Have the latest signature follow another plan where what steps took says so."""
        signature = self._signatures.latest
        if signature is None or signature.comparison is None:
            return
        if self._ranks.shares(signature):
            self._ranks.took(signature, signature.times.known_steps())
        elif signature.comparison.took(signature.times):
            signature.outdate()

    def _note_link(self) -> None:
        """Have the latest signature follow a new plan where its link is faster or slower by now."""
        signature = self._signatures.latest
        if signature is None or not self.maker.has_another_link(signature.root):
            return
        if signature.comparison is not None and not self._ranks.shares(signature):
            signature.comparison.start_again(self.maker.measured(signature))
        signature.outdate()

    def _note_shortage(self) -> None:
        """Have plans made anew, with less room, where a device's memory has run out since."""
        short = lacked(self.devices)
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
        """Have the next step be expected to be as a new plan of a signature says."""
        latest = self._signatures.latest
        if planned is not signature or (latest is not None and latest.root is signature):
            self._signatures.prefer(planned)

    def _expect_agreed(self, signature: StepSignature, planned: StepSignature) -> None:
        """Have the next step be expected to be as ranks have agreed on."""
        self._expect(signature, planned)

    # --- for people -------------------------------------------------------------------------

    @property
    def devices(self) -> Sequence[torch.device]:
        """The GPUs that values of the latest step signature lie on."""
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
        """Return what each budget would give the latest signature, which keeps its own plan."""
        signature = self._signatures.latest
        return [] if signature is None else self.maker.plans_for(budgets, signature.root)

    def settled_line(self) -> str | None:
        """Return, once, what the comparison of plans of the latest signature has come to."""
        signature = self._signatures.latest
        if signature is None or signature.comparison is None or signature.followed is None:
            return None
        line, shown = signature.comparison.line(), signature.followed.shown
        return line if line is None or shown is None else f"{line}: {shown.in_short()}"

    def is_comparing(self) -> bool:
        """Tell whether steps follow several plans by now, or will, to find the best."""
        signature = self._signatures.latest
        if signature is None or not signature.is_on_gpu:
            return False
        return signature.comparison is None or not signature.comparison.search.is_settled


class _FollowedStep(NamedTuple):
    """A step whose block has ended, and that has followed a plan."""

    times: StepTimes
    alternative: Alternative
    begun: Mark
    is_compared: bool
    """Whether it was as large as the others that are."""
