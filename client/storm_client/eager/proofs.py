"""At which sizes what steps do was found to have the same bits.

The rule, for all that is tried: **what was compared at three sizes is proved for all between the
smallest and the largest of them; before that, at exactly the sizes compared.** A size is that of
the value itself, in bytes.

A value is proved by a trial: a step does what is to be shown, and hands the value over besides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from storm_client.eager.bits import checksum
from storm_client.planner.decisions import Decision, Replay
from storm_client.planner.prices import MadeValue

if TYPE_CHECKING:
    from storm_client.eager.signature import StepSignature

__all__ = ["ENOUGH_SIZES", "Evidence", "Proofs", "Sizes", "Trial", "UnchangedTrial", "Ways"]

ENOUGH_SIZES: Final = 3
"""As in native/script.h."""

MOST_TRIES = 16
"""Of a value by one plan. So many forward passes may be in flight before the first backward pass; a
value that none has asked for by then is one that none will ask for."""

ENOUGH_TRIES: Final = 4
"""By which Python follows a step. What was not asked for by then compiled code goes on to try."""

Sizes: TypeAlias = tuple[int, ...]
"""In bytes, ascending: `ENOUGH_SIZES` of them stand for all between the first and the last."""


class Proofs:
    """What was compared and found to be the same, by size. Threads may share it."""

    def __init__(self) -> None:
        """Start with nothing proved."""
        self._sizes: dict[Hashable, Sizes] = {}
        self.version = 0
        """Changes with each proof that says more than those before."""

    def sizes(self, what: Hashable) -> Sizes:
        """Return the sizes at which something is proved."""
        return self._sizes.get(what, ())

    def holds(self, what: Hashable, nbytes: int) -> bool:
        """Tell whether something is proved at a size."""
        sizes = self._sizes.get(what, ())
        if len(sizes) < ENOUGH_SIZES:
            return nbytes in sizes
        return sizes[0] <= nbytes <= sizes[-1]

    def add(self, what: Hashable, nbytes: int) -> None:
        """Note that something was compared at a size, and was the same."""
        if self.holds(what, nbytes):
            return
        sizes = sorted((*self.sizes(what), nbytes))
        self._sizes[what] = (*sizes[: ENOUGH_SIZES - 1], *sizes[ENOUGH_SIZES - 1 :][-1:])
        self.version += 1


class Ways:
    """Numbers the ways in which values are recomputed.

    Two plans recompute a value in one way if its operation's inputs are held alike by both: each
    kept, offloaded or recomputed, and then in one way.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._numbers: dict[tuple[Hashable, ...], int] = {}

    def of(self, values: Sequence[MadeValue], decisions: Sequence[Decision]) -> list[int]:
        """Return for each value the number of its way by some decisions; -1 if it has none."""
        found: dict[int, int] = {}

        def way(number: int) -> int:
            if number not in found:
                found[number] = -1  # of one that is made from itself, which no plan asks for
                held = tuple((n, held_as(n)) for n in values[number].inputs)
                found[number] = self._numbers.setdefault((number, *held), len(self._numbers))
            return found[number]

        def held_as(number: int) -> Hashable:
            decision = None if number < 0 else decisions[number]
            return way(number) if isinstance(decision, Replay) else type(decision).__name__

        made = (isinstance(decision, Replay) for decision in decisions)
        return [way(number) if is_made else -1 for number, is_made in enumerate(made)]


class Evidence:
    """What trials have shown of the values of one step signature."""

    def __init__(self) -> None:
        """Start with nothing tried."""
        self.recomputed = Proofs()
        """Ways to recompute values that make the same bits."""
        self.ways = Ways()
        self.rejected: dict[int, str] = {}
        """Values that were not the same, with the reason."""
        self.unchanged = Proofs()
        """Values that leave as they were made, however late that is."""
        self.changed: set[int] = set()
        """Values that do not."""
        self._tries: Counter[int] = Counter()
        """How often a value has been tried by the present decisions."""
        self._never_asked: set[int] = set()
        """Values that were tried in vain by some decisions."""

    @property
    def version(self) -> int:
        """Changes with each proof that says more than those before, and each value given up."""
        return self.recomputed.version + len(self._never_asked)

    def prove(self, number: int, way: int, nbytes: int) -> None:
        """Note that a value was recomputed in some way and was the same at a size."""
        self.recomputed.add(way, nbytes)
        self._tries.pop(number, None)

    def goes_on_trying(self, number: int) -> bool:
        """Count a trial; tell whether backward passes may yet show what it is to show.

        Not of a value that they never ask for.
        """
        self._tries[number] += 1
        if self._tries[number] > MOST_TRIES:
            self._never_asked.add(number)
        return not self.is_given_up(number)

    def is_given_up(self, number: int) -> bool:
        """Tell whether no backward pass is expected to ask for a value any more."""
        return number in self._never_asked

    def has_tried(self, number: int) -> bool:
        """Tell whether compiled code may go on to try a value, which may never be asked for."""
        return self.is_given_up(number) or self._tries[number] >= ENOUGH_TRIES

    def forget_tries(self) -> None:
        """Note that other decisions are followed."""
        self._tries.clear()


class Trial(NamedTuple):
    """A tensor that is recomputed and handed over besides, so that both can be compared."""

    signature: StepSignature
    number: int
    """The tensor's value in that step signature."""
    way: int
    """In which it is recomputed by the plan of the step."""
    nbytes: int
    """Of its storage."""
    packed: Any = None

    def succeed(self) -> None:
        """Note that both were the same."""
        self.signature.evidence.prove(self.number, self.way, self.nbytes)

    def fail(self, reason: str) -> None:
        """Note that the value cannot be recomputed."""
        self.signature.reject(self.number, reason)


class UnchangedTrial(NamedTuple):
    """Finds out whether a value that leaves late has the bytes that were made."""

    signature: StepSignature
    number: int
    """The value in that step signature."""
    made: torch.Tensor
    """Its checksum behind the function that made it."""
    nbytes: int
    """Of its storage."""

    def is_same(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether what has left is the same; waits for the device."""
        return torch.equal(self.made, checksum(storage))

    def succeed(self) -> None:
        """Note that it is."""
        self.signature.evidence.unchanged.add(self.number, self.nbytes)

    def fail(self) -> None:
        """Note that it is not."""
        self.signature.evidence.changed.add(self.number)
