"""Records at which sizes recomputation was found to give the same bits.

The rule for every trial: **once a value was compared at three sizes, it is proved for all sizes
between the smallest and the largest of them; before that, at exactly the sizes compared.** A size
is that of the value itself, in bytes.

A trial proves a value: a step recomputes it, and also offloads it as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from storm_client.eager.ways import Way
from storm_client.planner.decisions import Replay

if TYPE_CHECKING:
    from storm_client.eager.followed_plan import FollowedPlan
    from storm_client.eager.signature import StepSignature

__all__ = ["ENOUGH_SIZES", "Evidence", "Proofs", "Sizes", "Trial"]

ENOUGH_SIZES: Final = 3
"""As in native/script.h."""

MAX_TRIES = 16
"""Trials of a value by one plan. That many forward passes may run before the first backward pass.
If no backward pass has asked for the value by then, none is expected to."""

ENOUGH_TRIES: Final = 4
"""Trials of a value for which Python follows the steps. Compiled code continues the trials of a
value that no backward pass has asked for by then."""

ENOUGH_SEARCHES: Final = 3
"""Steps whose logs have no call that made a value, until it is no longer recomputed."""

_AT_TIMES: Final = "recomputed, it had the same bits at times only"
_BY_SEVERAL: Final = "no single operator makes it, so compiled code could not follow its steps"

Sizes: TypeAlias = tuple[int, ...]
"""In bytes, ascending: `ENOUGH_SIZES` of them stand for all between the first and the last."""


class Proofs:
    """The sizes at which a value was compared and found the same. Threads may share it."""

    def __init__(self) -> None:
        """Start with nothing proved."""
        self._sizes: dict[Hashable, Sizes] = {}
        self.version = 0
        """Changes with each proof that says more than those before."""

    def sizes(self, what: Hashable) -> Sizes:
        """Return the sizes at which something is proved."""
        return self._sizes.get(what, ())

    def holds(self, what: Hashable, nbytes: int) -> bool:
        """Return whether something is proved at a size."""
        sizes = self._sizes.get(what, ())
        if len(sizes) < ENOUGH_SIZES:
            return nbytes in sizes
        return sizes[0] <= nbytes <= sizes[-1]

    def add(self, what: Hashable, nbytes: int) -> None:
        """Record that something was compared at a size, and was the same."""
        if self.holds(what, nbytes):
            return
        sizes = sorted((*self.sizes(what), nbytes))
        self._sizes[what] = (*sizes[: ENOUGH_SIZES - 1], *sizes[ENOUGH_SIZES - 1 :][-1:])
        self.version += 1


class Evidence:
    """The results of trials for the values of one step signature."""

    def __init__(self) -> None:
        """Start with nothing tried."""
        self.recomputed = Proofs()
        """Ways to recompute values that give the same bits."""
        self.rejected: dict[int, str] = {}
        """Values that cannot be recomputed, with the reason."""
        self.failed: dict[int, tuple[Trial, str]] = {}
        """By value: trials that have failed since the latest plan, with the reason."""
        self._failed_ways: set[tuple[Way, int]] = set()
        """Ways that have failed, each with the size."""
        self._tries: Counter[int] = Counter()
        """The number of trials of each value under the present decisions."""
        self._searches: Counter[int] = Counter()
        """The number of steps in whose logs no single call has made a value."""
        self._never_requested: set[int] = set()
        """Values for which no backward pass has asked in all trials of some plan."""

    @property
    def version(self) -> int:
        """Changes with each proof that says more than before, and each never-requested value."""
        return self.recomputed.version + len(self._never_requested)

    def prove(self, number: int, way: Way, nbytes: int) -> None:
        """Record that a value recomputed in some way was the same at a size.

        If that way has also failed at this size, the value is rejected. An example is a step with
        two backward passes, and an uncounted write between them.
        """
        if (way, nbytes) in self._failed_ways:
            self.rejected.setdefault(number, _AT_TIMES)
            return
        self.recomputed.add(way, nbytes)
        self._tries.pop(number, None)

    def fail(self, trial: Trial, reason: str) -> None:
        """Record that a trial has failed; `settle` finds the values at fault.

        If the same way has been proved at this size in the meantime, the value is rejected.
        """
        way = trial.plan.ways[trial.number]
        self.failed[trial.number] = trial, reason
        self._failed_ways.add((way, trial.nbytes))
        if self.recomputed.holds(way, trial.nbytes):
            self.rejected.setdefault(trial.number, _AT_TIMES)

    def note_unlogged(self, numbers: Collection[int]) -> bool:
        """Record that no call in a step's log made some values; return whether to reject them.

        Not at once: a user's dispatch mode hides all calls of a step.
        """
        self._searches.update(numbers)
        found = [one for one in numbers if self._searches[one] >= ENOUGH_SEARCHES]
        self.rejected.update({one: _BY_SEVERAL for one in found if one not in self.rejected})
        return bool(found)

    def count_trial(self, number: int) -> bool:
        """Count a trial; return whether a backward pass may still complete it.

        False for a value for which no backward pass is expected to ask.
        """
        self._tries[number] += 1
        if self._tries[number] > MAX_TRIES:
            self._never_requested.add(number)
        return not self.is_never_requested(number)

    def is_never_requested(self, number: int) -> bool:
        """Return whether no backward pass is expected to ask for a value any more."""
        return number in self._never_requested

    def settle(self) -> None:
        """Reject the values whose trials have failed since the last call, by their own fault.

        A value that is recomputed from one at fault is tried again: the next plan recomputes it in
        another way, and all that is made from it. If no fault explains a failure, the value itself
        is rejected; or first what has overwritten it, if that is recomputed.
        """
        latest, self.failed = self.failed, {}
        failed = list(latest.values())  # a backward pass may still add one
        at_fault = {
            trial.number
            for trial, _ in failed
            if not any(map(trial.is_unproved, trial.recomputed_inputs()))
        }
        for trial, reason in failed:
            if trial.number in at_fault or at_fault.isdisjoint(trial.recomputed_inputs()):
                for number in trial.overwriting() or [trial.number]:
                    self.rejected.setdefault(number, reason)

    def has_tried(self, number: int) -> bool:
        """Return whether compiled code may continue the trials of a value that is not proved."""
        return self.is_never_requested(number) or self._tries[number] >= ENOUGH_TRIES

    def forget_tries(self) -> None:
        """Reset the counts of trials, since other decisions are followed."""
        self._tries.clear()


class Trial(NamedTuple):
    """A tensor that is recomputed and also offloaded, so that both can be compared."""

    signature: StepSignature
    number: int
    """The number of the tensor's value in that step signature."""
    plan: FollowedPlan
    """The step's plan, which says in which way it recomputes the value."""
    nbytes: int
    """Of its storage."""
    packed: Any = None

    def succeed(self) -> None:
        """Record that both were the same."""
        self.signature.evidence.prove(self.number, self.plan.ways[self.number], self.nbytes)
        if self.number in self.signature.evidence.rejected:
            self.signature.outdate()

    def fail(self, reason: str) -> None:
        """Record that the value could not be recomputed."""
        without_bytes = self._replace(packed=None)  # until it is settled, many steps may run
        self.signature.fail(without_bytes, reason)

    def recomputed_inputs(self) -> Iterator[int]:
        """Yield the values that the plan recomputes for this one, at any distance."""
        waiting, seen = [self.number], set[int]()
        while waiting:
            for number in self.signature.values[waiting.pop()].inputs:
                if number in seen or not isinstance(self.plan.decision_for(number, 0), Replay):
                    continue
                seen.add(number)
                waiting.append(number)
                yield number

    def overwriting(self) -> list[int]:
        """Return the values that have overwritten this one and that the plan recomputes."""
        after = (one.number for one in self.signature.values if self.number in one.over)
        return [one for one in after if isinstance(self.plan.decision_for(one, 0), Replay)]

    def is_unproved(self, number: int) -> bool:
        """Return whether a value has a trial of its own, which has not proved the plan's way."""
        proofs = self.signature.evidence.recomputed
        is_saved = self.signature.values[number].is_saved
        return is_saved and not proofs.sizes(self.plan.ways[number])
