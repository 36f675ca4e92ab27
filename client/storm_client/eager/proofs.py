"""At which sizes what steps do was found to have the same bits.

The rule, for all that is tried: **what was compared at three sizes is proved for all between the
smallest and the largest of them; before that, at exactly the sizes compared.** A size is that of
the value itself, in bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, TypeAlias

from storm_client.planner.decisions import Decision, Replay
from storm_client.planner.prices import MadeValue

__all__ = ["ENOUGH_SIZES", "Proofs", "Sizes", "Ways"]

ENOUGH_SIZES: Final = 3
"""As in native/script.h."""

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
        sizes = self.sizes(what)
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
