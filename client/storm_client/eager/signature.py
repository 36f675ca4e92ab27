"""What is known of the steps of an Offload, one record for each step signature.

Two steps are of one signature if they made and saved the same values in the same order: the same
functions on the same inputs, and the same dtypes. Of each value the largest size seen is known, and
plans are made for those; what is larger than its plan knows is not kept, so that budgets hold.

A signature is learned once a step of it has ended. It is planned from the first plan on that its
steps follow, and its plans are compared once it is known what a forward pass takes.

Nothing here decides what is returned: that a value can be recomputed is shown by what the step at
hand has run, never by what another did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch

from storm_client.eager.comparison import Comparison
from storm_client.eager.events import SAVED, Event, RecordedValue, saved_numbers
from storm_client.eager.followed_plan import Expected, FollowedPlan
from storm_client.eager.following import Rest
from storm_client.eager.gradients import Gradients, may_lie_elsewhere
from storm_client.eager.proofs import Evidence
from storm_client.eager.step_times import OBSERVED, Duration, StepTimes
from storm_client.planner.blocks import block_ends
from storm_client.planner.decisions import REPLAY, Decision, Replay
from storm_client.planner.joints import repeated_ends
from storm_client.planner.link_watch import LinkWatch
from storm_client.planner.prices import likeness

if TYPE_CHECKING:
    from storm_client.eager.following import Noted
    from storm_client.planner.plan import Plan

__all__ = ["NEAR_LARGEST", "StepSignature"]

FEWEST_EXPECTED: Final = 2
"""Half as many as steps of a signature that has been left in the middle come as expected first."""

NEAR_LARGEST: Final = 0.97
"""Of what the largest step saves: steps that save as much are compared by what they take."""


class StepSignature:
    """One step signature: what its steps do, what they have shown, and the plan that they follow.

    That of the same steps with nobody watching their functions is another, which has its plans, its
    times and its news from this one: its `root`.
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
        """On which its values lie, that with the most bytes first."""
        self.has_functions = any(event[0] is not SAVED for event in events)
        """Whether what its steps ran was recorded, beside what they saved."""
        self.seen = 0
        """Steps that were like it."""
        self.has_launches = False
        """Whether some of its steps have launched kernels of Triton's."""
        self.is_ambiguous = False
        """Whether a step was like this one and then did something else, not long ago."""
        self._sure_after = FEWEST_EXPECTED
        """How many steps have to come as expected for it not to be any more."""
        self._came_as_expected = 0
        self.evidence = Evidence()
        self.rest = Rest()
        self.followed: FollowedPlan | None = None
        """The plan that its steps follow; None until there is one."""
        self._noted: dict[tuple[Decision, ...], list[Noted]] = {}
        """See `FollowedPlan.noted`."""
        self._gave_back = False
        """Whether the memory that learning has needed was given back before."""
        self._without_functions: StepSignature | None = None
        # Of the root:
        self.times: StepTimes = StepTimes(is_on_gpu=self.is_on_gpu) if root is None else root.times
        """What its steps took."""
        self.link: LinkWatch = LinkWatch() if root is None else root.link
        """What its plan takes the link for."""
        self.plain_loss_bytes = 0
        """The most of what its steps have noted of that; see Problem."""
        self._gradients = Gradients()
        self._comparison: Comparison | None = None
        self._is_outdated = True

    @property
    def root(self) -> StepSignature:
        """The signature of the same steps with their functions, or this one."""
        return self._root or self

    @property
    def is_on_gpu(self) -> bool:
        """Whether its values lie in a GPU's memory."""
        return bool(self.devices)

    @property
    def clock(self) -> torch.device | None:
        """The GPU that its passes are timed on; None for the host."""
        return self.devices[0] if self.devices else None

    @property
    def script(self) -> list[Expected] | None:
        """What a step does that follows the plan; None where it has to be watched closely."""
        return None if self.followed is None or self.is_ambiguous else self.followed.script

    @property
    def may_replay(self) -> bool:
        """Whether something is recomputed, or nobody knows yet."""
        return self.followed is None or self.followed.has_replays

    # --- news: what plans do not know yet ---------------------------------------------------

    @property
    def is_outdated(self) -> bool:
        """Whether something was learned that the plan does not know."""
        return self.root._is_outdated

    def outdate(self) -> None:
        """Have its plan be made anew."""
        self.root._is_outdated = True

    def is_told(self) -> None:
        """Note that the next plan knows all that was learned so far."""
        self.root._is_outdated = False

    def reject(self, number: int, reason: str) -> None:
        """Note that a value cannot be had again by its operation."""
        self.evidence.rejected.setdefault(number, reason)
        self.outdate()

    # --- sizes ------------------------------------------------------------------------------

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
        """The values that checkpointing each block of its steps would keep.

        Blocks are layers with numbers, or what repeats where there are none.
        """
        return block_ends(self.values) or repeated_ends(self.values)

    @property
    def checkpointed_bytes(self) -> int | None:
        """What those come to; None where no blocks are known."""
        root = self.root
        return sum(root.values[n].nbytes for n in root.block_ends) or None

    def share(self, handed_over: int) -> float:
        """Return which part so many bytes are of those that the largest step hands over."""
        return min(1.0, handed_over / self.handed_over_bytes) if handed_over else 1.0

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
        for name in ("saved_bytes", "handed_over_bytes", "block_ends"):
            self.__dict__.pop(name, None)
        growth = self.saved_bytes / before if before else 1.0
        for value in self.values:
            if not value.is_saved:
                value.grow(int(growth * value.nbytes))
        if self._root is not None:
            numbers = saved_numbers(self._root.events)
            self._root.grow({numbers[n]: nbytes for n, nbytes in larger.items()})
            return
        self.outdate()
        self.times.grow(growth)
        if self._comparison is not None and growth * NEAR_LARGEST > 1.0:
            self._comparison.search.forget()

    def note_loss(self, plain_bytes: int) -> None:
        """Note what PyTorch's own loss would take beyond the one that a step computes in tiles."""
        root = self.root
        if plain_bytes > root.plain_loss_bytes:
            root.plain_loss_bytes = plain_bytes
            root.outdate()

    def note_gradients(self, gradients: Gradients) -> None:
        """Note what a step has shown of gradients of parameters."""
        self._plan_with_gradients(is_news=self.root._gradients.join(gradients))

    def look_for_gradients(self) -> None:
        """Look whether gradients are there as a step begins."""
        self._plan_with_gradients(is_news=self.root._gradients.look())

    def _plan_with_gradients(self, *, is_news: bool) -> None:
        if is_news and not may_lie_elsewhere():  # else plans count on them already
            self.root.outdate()

    @property
    def finds_gradients(self) -> bool:
        """Whether gradients of parameters may be there when its steps begin."""
        return self.root._gradients.are_found or may_lie_elsewhere()

    # --- plans ------------------------------------------------------------------------------

    @property
    def comparison(self) -> Comparison | None:
        """The plans that are compared; None while it is not known what a forward pass takes."""
        return self.root._comparison

    def compare(self, comparison: Comparison) -> Comparison:
        """Have plans be compared from now on."""
        self.root._comparison = comparison
        return comparison

    def follow(self, decisions: list[Decision], shown: Plan | None = None) -> None:
        """Follow these from now on. What is recomputed in a new way has to prove itself anew.

        What a value is made from may be another now, and what is the same by one way may not be by
        another, where something writes to memory without being counted.
        """
        decisions = _with_overwritten(self.values, decisions)
        self.is_told()
        before, ways = self.followed, self.evidence.ways.of(self.values, decisions)
        noted = self._noted.setdefault(tuple(decisions), [])
        followed = FollowedPlan(
            self.events, self.values, decisions, ways=ways, noted=noted, shown=shown
        )
        if before is not None and before.decisions == decisions:
            followed.goes_on_from(before)
        else:
            self.evidence.forget_tries()
        self.followed = followed

    def watch_closely(self) -> None:
        """Have no step walk along the script, until they come as expected for twice as long."""
        self.is_ambiguous, self._came_as_expected = True, 0
        self._sure_after *= 2

    def came(self, *, as_expected: bool) -> None:
        """Note that a step was one of these."""
        self._came_as_expected = self._came_as_expected + 1 if as_expected else 0
        if self._came_as_expected >= self._sure_after:
            self.is_ambiguous = False

    def settles(self) -> bool:
        """Tell, once, whether steps have got used to the present decisions.

        While plans are compared that is told of the first alone, and of the one that stays.
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

    def observe(self, forward: Duration, share: float = 1.0, *, by_python: bool = False) -> None:
        """Note a forward pass that followed the plan; two of them make it anew.

        It has handed over a `share` of what the largest does.
        """
        assert self.followed is not None
        self.followed.steps += 1
        self.followed.by_python += by_python
        if self.times.observe(forward, share):
            self.outdate()

    def without_functions(self) -> StepSignature:
        """Return the signature of the same steps where nobody watches their functions."""
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
        """Take what operations took in other signatures where they are alike and have no time.

        What a step does as others before it did is not timed again.
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
    """Return decisions by which is recomputed, too, what the recomputed were written over."""
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
