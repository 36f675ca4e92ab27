"""Step signatures: one record for each kind of step of an Offload, with all that is known of it.

Two steps have the same signature if they made and saved the same values in the same order: the same
functions on the same inputs, and the same dtypes. A signature knows the largest size seen of each
value, and plans are made for these sizes. A value that is larger than its plan knows is not kept,
so that budgets hold.

A signature is learned once a step of it has ended. It is planned once there is a plan that its
steps follow. Its plans are compared once the time of a forward pass is known.

Nothing here decides which bits a recomputation returns. A recipe is made only of operations that
the current step has run, never of those of another step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch

from storm_client.eager.comparison import Comparison
from storm_client.eager.events import SAVED, Event, LoggedEvent, RecordedValue, saved_numbers
from storm_client.eager.followed_plan import Expected, FollowedPlan
from storm_client.eager.following import PythonFallback
from storm_client.eager.gradients import Gradients, may_lie_elsewhere
from storm_client.eager.proofs import Evidence, Trial
from storm_client.eager.step_times import OBSERVED, StepTimes
from storm_client.planner.blocks import block_ends
from storm_client.planner.decisions import REPLAY, Decision, Replay
from storm_client.planner.link_watch import LinkWatch
from storm_client.planner.prices import likeness
from storm_client.planner.problem import NO_LOSS, PlainLoss
from storm_client.planner.repeated_blocks import repeated_ends

if TYPE_CHECKING:
    from storm_client.eager.marks import Mark
    from storm_client.planner.plan import Plan

__all__ = ["NEAR_LARGEST", "StepSignature"]

FEWEST_EXPECTED: Final = 2
"""Half the number of matching steps needed after a script is first left in the middle."""

NEAR_LARGEST: Final = 0.97
"""Share of the largest step's saved bytes: the times of steps that save as much are compared."""


class StepSignature:
    """One step signature: what its steps do, what they have shown, and the plan that they follow.

    The same steps, while nobody watches their functions, have another signature. That one takes its
    plans, times and news from this signature, its `root`.
    """

    def __init__(
        self,
        events: tuple[Event, ...],
        values: list[RecordedValue],
        *,
        is_learned: bool = True,
        root: StepSignature | None = None,
    ) -> None:
        """Describe a step that made and saved `values`."""
        self.events = events
        self.values = values
        self.is_learned = is_learned
        """Whether the functions of its steps were watched as far as they may be."""
        self._root = root
        self.devices = _gpus(values)
        """The GPUs that hold its values, the one with the most bytes first."""
        self.has_functions = any(event[0] is not SAVED for event in events)
        """Whether the functions that its steps ran were recorded, besides their saves."""
        self.seen = 0
        """The number of steps of this signature."""
        self.has_launches = False
        """Whether some of its steps have launched Triton kernels."""
        self.is_ambiguous = False
        """Whether a recent step began like this signature and then differed."""
        self._sure_after = FEWEST_EXPECTED
        """The number of steps that must match as expected before this is reset."""
        self._came_as_expected = 0
        self.evidence = Evidence()
        self.fallback = PythonFallback()
        self.followed: FollowedPlan | None = None
        """The plan that its steps follow; None until there is one."""
        self._logged: dict[tuple[Decision, ...], list[LoggedEvent]] = {}
        """See `FollowedPlan.logged`."""
        self._gave_back = False
        """Whether the memory that learning needed was given back before."""
        self._without_functions: StepSignature | None = None
        # Shared with the root, or used only there:
        self.times: StepTimes = StepTimes(is_on_gpu=self.is_on_gpu) if root is None else root.times
        """The times of its steps."""
        self.link: LinkWatch = LinkWatch() if root is None else root.link
        """The link speed that its plan assumes."""
        self.plain_loss = NO_LOSS
        """The largest values of its steps; see Problem."""
        self._gradients = Gradients()
        self._comparison: Comparison | None = None
        self._is_outdated = True

    @property
    def root(self) -> StepSignature:
        """The signature of the same steps with their functions, or this signature itself."""
        return self._root or self

    @property
    def is_on_gpu(self) -> bool:
        """Whether any of its values are in GPU memory."""
        return bool(self.devices)

    @property
    def clock(self) -> torch.device | None:
        """The GPU that its passes are timed on; None for the host."""
        return self.devices[0] if self.devices else None

    @property
    def script(self) -> list[Expected] | None:
        """The script of the plan; None without a plan, and where steps are watched closely."""
        return None if self.followed is None or self.is_ambiguous else self.followed.script

    @property
    def may_replay(self) -> bool:
        """Whether its plan recomputes something, or there is no plan yet."""
        return self.followed is None or self.followed.has_replays

    # --- news: knowledge that is not in the plan yet ----------------------------------------

    @property
    def is_outdated(self) -> bool:
        """Whether something was learned that is not in the plan."""
        return self.root._is_outdated

    def outdate(self) -> None:
        """Have its plan made anew."""
        self.root._is_outdated = True

    def mark_planned(self) -> None:
        """Note that the next plan uses all that was learned so far."""
        self.root._is_outdated = False

    def fail(self, trial: Trial, reason: str) -> None:
        """Record that a trial has failed; the next plan rejects the values that are at fault."""
        self.evidence.fail(trial, reason)
        self.outdate()

    def note_unlogged(self, numbers: Collection[int]) -> None:
        """Record that no single call in a step's log made some values that recomputation needs.

        After a few such steps nothing is recomputed that is one of them, or is made from one.
        """
        unlogged = set(numbers)
        decisions = [] if self.followed is None else self.followed.decisions
        recomputed = [
            value.number
            for value, decision in zip(self.values, decisions, strict=False)
            if isinstance(decision, Replay) and unlogged & {value.number, *value.inputs}
        ]
        if self.evidence.note_unlogged(recomputed):
            self.outdate()

    # --- sizes ------------------------------------------------------------------------------

    @cached_property
    def saved_bytes(self) -> int:
        """The saved bytes of its largest step: the largest size of each saved value, summed."""
        return sum(value.nbytes for value in self.values if value.is_saved)

    @cached_property
    def saved_bytes_with_repeats(self) -> int:
        """The same, counting each save of a value."""
        return sum(value.nbytes * value.uses for value in self.values)

    @cached_property
    def block_ends(self) -> frozenset[int]:
        """The values that checkpointing each block of its steps would keep.

        Blocks are numbered layers, or repeated parts of the step where there are none.
        """
        repeated = (n for n in repeated_ends(self.values) if not self.values[n].is_made_inside)
        return block_ends(self.values) or frozenset(repeated)

    @property
    def checkpointed_bytes(self) -> int | None:
        """The bytes of these values; None where no blocks are known."""
        root = self.root
        return sum(root.values[n].nbytes for n in root.block_ends) or None

    def share(self, nbytes: int) -> float:
        """Return the share that `nbytes` are of the largest step's saves; 1.0 for no bytes."""
        return min(1.0, nbytes / self.saved_bytes_with_repeats) if nbytes else 1.0

    def grow(self, sizes: Mapping[int, int]) -> None:
        """Take over the `sizes` in bytes of values, by number, where they are larger than known.

        Sizes of values that are not saved are recorded only where recipes read them. The others are
        assumed to grow by the same factor as all saved values together.
        """
        larger = {n: nbytes for n, nbytes in sizes.items() if nbytes > self.values[n].nbytes}
        if not larger:
            return
        before = self.saved_bytes
        for number, nbytes in larger.items():
            self.values[number].grow(nbytes)
        for name in ("saved_bytes", "saved_bytes_with_repeats", "block_ends"):
            self.__dict__.pop(name, None)
        growth = self.saved_bytes / before if before else 1.0
        for value in self.values:
            if not value.is_saved and value.number not in larger:
                value.grow(int(growth * value.nbytes))
        if self._root is not None:
            numbers = saved_numbers(self._root.events)
            self._root.grow({numbers[n]: nbytes for n, nbytes in larger.items()})
            return
        self.outdate()
        self.times.grow(growth)
        if self._comparison is not None and growth * NEAR_LARGEST > 1.0:
            self._comparison.search.forget()

    def note_loss(self, plain: PlainLoss) -> None:
        """Record what PyTorch's own loss would take beyond a step's loss in tiles."""
        root = self.root
        larger = root.plain_loss.or_larger(plain)
        if larger != root.plain_loss:
            root.plain_loss = larger
            root.outdate()

    def note_gradients(self, gradients: Gradients) -> None:
        """Record what a step has shown about gradients of parameters."""
        self._plan_with_gradients(is_news=self.root._gradients.join(gradients))

    def look_for_gradients(self) -> None:
        """Check whether gradients exist as a step begins."""
        self._plan_with_gradients(is_news=self.root._gradients.look())

    def _plan_with_gradients(self, *, is_news: bool) -> None:
        if is_news and not may_lie_elsewhere():  # else plans assume gradients already
            self.root.outdate()

    @property
    def finds_gradients(self) -> bool:
        """Whether gradients of parameters may exist when its steps begin."""
        return self.root._gradients.are_found or may_lie_elsewhere()

    # --- plans ------------------------------------------------------------------------------

    @property
    def comparison(self) -> Comparison | None:
        """The comparison of its plans; None until the time of a forward pass is known."""
        return self.root._comparison

    @property
    def is_settled(self) -> bool:
        """Whether its plans have been compared, and the best is followed."""
        return self.comparison is not None and self.comparison.search.is_settled

    @property
    def wants_turn(self) -> bool:
        """Whether its plans still have to learn how long a turn lasts."""
        return self.root._comparison is None or self.root._comparison.wants_turn

    def compare(self, comparison: Comparison) -> Comparison:
        """Compare plans from now on."""
        self.root._comparison = comparison
        return comparison

    def follow(self, decisions: list[Decision], shown: Plan | None = None) -> None:
        """Follow these decisions from now on. A new way to recompute a value has to be proved anew.

        The inputs of a value may be held differently now. A value that is the same in one way may
        differ in another, where something writes to memory uncounted.
        """
        decisions = _with_overwritten(self.values, decisions)
        self.mark_planned()
        before, logged = self.followed, self._logged.setdefault(tuple(decisions), [])
        followed = FollowedPlan(self.events, self.values, decisions, logged=logged, shown=shown)
        if before is not None and before.decisions == decisions:
            followed.goes_on_from(before)
        else:
            self.evidence.forget_tries()
        self.followed = followed

    def watch_closely(self) -> None:
        """Let no step follow the script until steps match, twice as many as the last time."""
        self.is_ambiguous, self._came_as_expected = True, 0
        self._sure_after *= 2

    def note_ended(self, *, as_expected: bool) -> None:
        """Note that a step of this signature has ended."""
        self._came_as_expected = self._came_as_expected + 1 if as_expected else 0
        if self._came_as_expected >= self._sure_after:
            self.is_ambiguous = False

    def settles(self) -> bool:
        """Return True once, when enough steps have followed the present decisions.

        While plans are compared, it does so only for the first of them, and for the chosen one.
        """
        followed, comparison = self.followed, self.comparison
        if followed is None or followed.is_settled or followed.steps < OBSERVED:
            return False
        is_searching = comparison is not None and not comparison.search.is_settled
        if is_searching and self._gave_back:
            return False
        followed.is_settled, self._gave_back = not is_searching, True
        return True

    @property
    def wants_full_queue(self) -> bool:
        """Whether the next forward pass is to be timed with all of it in the device's queue."""
        return self.followed is not None and self.times.wants_full_queue

    def observe(self, begun: Mark, share: float = 1.0, *, by_python: bool = False) -> None:
        """Note that a forward pass has followed the plan to its end.

        Until two are known, its time since `begun` is recorded; two outdate the plan. The step
        saved a `share` of the bytes that the largest step saves.
        """
        assert self.followed is not None
        self.followed.steps += 1
        self.followed.by_python += by_python
        if self.times.window is None and self.times.observe(begun.until_now(), share):
            self.outdate()

    def without_functions(self) -> StepSignature:
        """Return the signature of the same steps while nobody watches their functions."""
        numbers = {old: new for new, old in enumerate(saved_numbers(self.events))}
        if self._without_functions is None:
            saved = (event for event in self.events if event[0] is SAVED)
            events = tuple((what, numbers[old], *rest) for what, old, *rest in saved)
            values = [
                replace(self.values[old], number=new, inputs=(), over=())
                for old, new in numbers.items()
            ]
            self._without_functions = StepSignature(events, values, root=self)
        other, rejected = self._without_functions, self.evidence.rejected
        other.grow({new: self.values[old].nbytes for old, new in numbers.items()})
        other.evidence.rejected = {numbers[n]: why for n, why in rejected.items() if n in numbers}
        return other

    def take_times(self, others: Iterable[StepSignature]) -> None:
        """Take over the times of like operations in other signatures, for those without a time.

        An operation that earlier steps ran as well is not timed again.
        """
        known: dict[object, RecordedValue] = {}
        for signature in others:
            for value in signature.values:
                if value.operation and value.is_timed:
                    known.setdefault((value.device, likeness(value, signature.values)), value)
        for value in self.values:
            if value.operation and not value.is_timed:
                like = known.get((value.device, likeness(value, self.values)))
                if like is not None:
                    value.seconds, value.timing = like.seconds, like.timing


def _with_overwritten(values: list[RecordedValue], decisions: list[Decision]) -> list[Decision]:
    """Return decisions that also recompute the values that recomputed ones have overwritten."""
    decisions = list(decisions)
    for value in reversed(values):
        if isinstance(decisions[value.number], Replay):
            for number in value.over:
                decisions[number] = REPLAY
    return decisions


def _gpus(values: Iterable[RecordedValue]) -> tuple[torch.device, ...]:
    nbytes: Counter[torch.device] = Counter()
    for value in values:
        if value.device.type == "cuda":
            nbytes[value.device] += value.nbytes
    return tuple(device for device, _ in nbytes.most_common())
