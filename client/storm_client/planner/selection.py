"""Selects a choice for each group of values, under a budget and a link that all groups share.

At first, all groups choose by the same prices, so that they keep a little more or less than the
budget allows. If groups are identical, that is far from the best: all of them switch at the same
price. So one or two groups at a time change their choices, as long as that saves time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, permutations, starmap
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from storm_client.planner.groups import LINK_SHARES, Alike, GroupChoice
from storm_client.planner.prices import Priced

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["choices"]

MAX_CHANGES: Final = 500
"""Changes that are tried in pairs; if there are more, each is tried alone."""

MIN_GAIN: Final = 1e-9
"""Seconds: a change that saves less is ignored."""

_Counts: TypeAlias = "npt.NDArray[np.int64]"
"""How many groups take each choice, by its number."""


def choices(priced: Priced, alike: Sequence[Alike], room: int) -> Iterator[list[GroupChoice]]:
    """Yield choices for all groups of a step's values that keep at most `room` bytes together.

    Each list has one `GroupChoice` for each group, with the numbers of its values. Of identical
    groups the last keep most: their values are needed first.
    """
    free_link_seconds = priced.window + priced.problem.last_bytes * priced.machine.link
    for one in alike:
        one.choices.explore(priced, keeps=room > 0)
    if not alike:
        yield []
        return
    known = _Known(alike)
    for share in LINK_SHARES:
        for begun in known.by_prices(share, room):
            taken = _Selection(known, begun, room, free_link_seconds)
            taken.fit()
            while taken.improve():
                pass
            yield list(known.group_choices(taken.counts))


@dataclass
class _Known:
    """The known choices of all groups, numbered, and the changes from one to another."""

    alike: Sequence[Alike]
    choices: list[GroupChoice] = field(init=False)
    places: list[slice] = field(init=False)
    """The numbers of the choices of each set of identical groups."""
    costs: npt.NDArray[np.float64] = field(init=False)
    """Of each choice, as in `Costs`: kept bytes, link seconds, other seconds."""
    origins: npt.NDArray[np.intp] = field(init=False)
    targets: npt.NDArray[np.intp] = field(init=False)
    """The choices that a change of one group leads from and to."""
    more: npt.NDArray[np.float64] = field(init=False)
    """Additional costs of the other choice."""

    def __post_init__(self) -> None:
        """Number the choices."""
        sizes = [len(one.choices.costs) for one in self.alike]
        self.choices = [choice for one in self.alike for choice in one.choices.costs]
        self.places = list(starmap(slice, pairwise(accumulate(sizes, initial=0))))
        self.costs = np.array([cost for one in self.alike for cost in one.choices.costs.values()])
        within = (permutations(range(one.start, one.stop), 2) for one in self.places)
        pairs = np.array([*chain.from_iterable(within)], np.intp).reshape(-1, 2)
        self.origins, self.targets = pairs.T
        self.more = self.costs[self.targets] - self.costs[self.origins]

    def by_prices(self, share: float, room: int) -> Iterator[_Counts]:
        """Yield what all groups choose at a given `share` of the link's price.

        The price of a kept byte is set so that they keep just less than `room`, and then just more.
        """

        def at(price: float) -> tuple[_Counts, float, float]:
            counts = self._best_at(share, price)
            kept, link, seconds = counts @ self.costs
            return counts, kept, seconds + share * link

        many, few = at(0.0), at(math.inf)
        while many[1] > room:
            between = at((few[2] - many[2]) / (many[1] - few[1]))
            if not few[1] < between[1] < many[1]:
                yield few[0]
                break
            if between[1] > room:
                many = between
            else:
                few = between
        yield many[0]

    def _best_at(self, share: float, price: float) -> _Counts:
        """Return each group's best choice for a `price` of a kept byte and a `share` of link time.

        All groups that are identical take the same.
        """
        kept, link, seconds = self.costs.T
        costs = seconds + share * link + np.where(kept > 0, price * np.maximum(kept, 1), 0.0)
        counts = np.zeros(len(costs), np.int64)
        for one, places in zip(self.alike, self.places, strict=True):
            counts[places.start + costs[places].argmin()] = len(one.groups)
        return counts

    def group_choices(self, counts: _Counts) -> Iterator[GroupChoice]:
        """Yield the choice of each group, with the numbers of its values."""
        for one, places in zip(self.alike, self.places, strict=True):
            chosen = np.repeat(np.arange(len(counts))[places], counts[places])
            chosen = chosen[np.argsort(self.costs[chosen, 0], kind="stable")]
            for number, numbers in zip(chosen, one.groups, strict=True):
                yield self.choices[number].of(numbers)


@dataclass
class _Selection:
    """The choices that groups take."""

    known: _Known
    counts: _Counts
    room: int
    """Bytes that all groups may keep together."""
    free_link_seconds: float
    """Seconds of the link that cost nothing."""

    def fit(self) -> None:
        """Keep less while it is too much; first make the change that costs least per freed byte."""
        known = self.known
        while (now := self.counts @ known.costs)[0] > self.room:
            fewer = np.flatnonzero((self.counts[known.origins] > 0) & (known.more[:, 0] < 0))
            kept, link, seconds = known.more[fewer].T
            seconds = seconds + self._late(now[1] + link) - self._late(now[1])
            self._make(fewer[(seconds / -kept).argmin()])

    def improve(self) -> bool:
        """Make the change that saves most; return whether there is one.

        Two groups change together only where no change of one group saves anything.
        """
        possible = np.flatnonzero(self.counts[self.known.origins])
        if not possible.size:
            return False
        if self._improve(possible, possible[:0]):
            return True
        return possible.size < MAX_CHANGES and self._improve(possible, possible)

    def _improve(self, first: npt.NDArray[np.intp], second: npt.NDArray[np.intp]) -> bool:
        """Make one of the `first` changes, with one of the `second` or none: what saves most."""
        known, now = self.known, self.counts @ self.known.costs
        none = np.zeros((1, 3))
        more = known.more[first, None] + np.vstack([none, known.more[second]])
        kept, link, totals = more.transpose(2, 0, 1)
        totals += self._late(now[1] + link)
        totals[now[0] + kept > self.room] = math.inf
        origins = known.origins[first, None]
        is_same = origins == np.append(-1, known.origins[second])
        totals[is_same & (self.counts[origins] < 2)] = math.inf
        found = np.unravel_index(int(totals.argmin()), totals.shape)
        if totals[found] >= self._late(now[1]) - MIN_GAIN:
            return False
        self._make(first[found[0]])
        if found[1]:
            self._make(second[found[1] - 1])
        return True

    def _late(self, link_seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return by how many seconds the link is later than the forward pass."""
        return np.maximum(link_seconds - self.free_link_seconds, 0.0)

    def _make(self, change: np.intp) -> None:
        self.counts[self.known.origins[change]] -= 1
        self.counts[self.known.targets[change]] += 1
