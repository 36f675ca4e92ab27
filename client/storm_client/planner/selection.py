"""Selects a choice for each group of values, under a budget and a link that all groups share.

At first, all groups choose by the same prices, so that they keep a little more or less than the
budget allows. If groups are identical, that is far from the best: all of them switch at the same
price. So one or two groups at a time change their choices, as long as that saves time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from storm_client.planner.groups import LINK_SHARES, Alike, Costs, GroupChoice
from storm_client.planner.prices import Priced

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["choices"]

MAX_CHANGES: Final = 500
"""Changes that are tried in pairs; if there are more, each is tried alone."""

MIN_GAIN: Final = 1e-9
"""Seconds: a change that saves less is ignored."""


def choices(priced: Priced, alike: Sequence[Alike], room: int) -> Iterator[list[GroupChoice]]:
    """Yield choices for all groups of a step's values that keep at most `room` bytes together.

    Each list has one `GroupChoice` for each group, with the numbers of its values. Of identical
    groups the last keep most: their values are needed first.
    """
    free_link_seconds = priced.window + priced.problem.last_bytes * priced.machine.link
    for one in alike:
        one.choices.explore(priced, keeps=room > 0)
    for share in LINK_SHARES:
        for begun in _by_prices(alike, share, room):
            taken = _Selection(alike, begun, room, free_link_seconds)
            taken.fit()
            while taken.improve():
                pass
            yield list(taken.group_choices())


def _by_prices(
    alike: Sequence[Alike], share: float, room: int
) -> Iterator[list[Counter[GroupChoice]]]:
    """Yield what all groups choose at a given `share` of the link's price.

    The price of a kept byte is set so that they keep just less than `room`, and then just more.
    """

    def at(price: float) -> tuple[list[Counter[GroupChoice]], int, float]:
        taken = [Counter({one.choices.best_at(share, price): len(one.groups)}) for one in alike]
        costs = _sum(alike, taken)
        return taken, costs.kept_bytes, costs.seconds + share * costs.link_seconds

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


def _sum(alike: Sequence[Alike], taken: Sequence[Counter[GroupChoice]]) -> Costs:
    """Return the total costs of all groups' choices."""
    found = [
        [count * cost for cost in one.choices.costs[choice]]
        for one, counts in zip(alike, taken, strict=True)
        for choice, count in counts.items()
    ]
    return Costs(*map(sum, zip(*found, strict=True))) if found else Costs(0, 0.0, 0.0)


class _Change(NamedTuple):
    """A change of one group from one choice to another, or no change."""

    which: int = -1
    """Index of the set of identical groups."""
    choice: GroupChoice | None = None
    other: GroupChoice | None = None
    groups: int = 2
    """How many groups could make this change."""
    more: Costs = Costs(0, 0.0, 0.0)
    """Additional costs of the other choice."""


@dataclass
class _Selection:
    """The choices that groups take."""

    alike: Sequence[Alike]
    counts: Sequence[Counter[GroupChoice]]
    """How many groups take each choice, for each set of identical groups."""
    room: int
    """Bytes that all groups may keep together."""
    free_link_seconds: float
    """Seconds of the link that cost nothing."""

    def group_choices(self) -> Iterator[GroupChoice]:
        """Yield the choice of each group, with the numbers of its values."""
        for one, counts in zip(self.alike, self.counts, strict=True):
            chosen = sorted(
                counts.elements(), key=lambda choice: one.choices.costs[choice].kept_bytes
            )
            for choice, numbers in zip(chosen, one.groups, strict=True):
                yield choice.of(numbers)

    def fit(self) -> None:
        """Keep less while it is too much; first make the change that costs least per freed byte."""
        while (now := _sum(self.alike, self.counts)).kept_bytes > self.room:
            fewer = [change for change in self._changes() if change.more.kept_bytes < 0]
            prices = [self._seconds(change.more, now) / -change.more.kept_bytes for change in fewer]
            self._make(fewer[prices.index(min(prices))])

    def improve(self) -> bool:
        """Make the change of one or two groups that saves most; return whether there is one."""
        now = _sum(self.alike, self.counts)
        changes = [_Change(), *self._changes()]
        firsts = np.array([change.more for change in changes])
        seconds = firsts[:1] if len(changes) > MAX_CHANGES else firsts
        kept, link, totals = (firsts[:, None] + seconds[None]).transpose(2, 0, 1)
        totals += np.maximum(now.link_seconds + link - self.free_link_seconds, 0.0)
        totals[now.kept_bytes + kept > self.room] = math.inf
        totals[_clash(changes)[:, : len(seconds)]] = math.inf
        found = np.unravel_index(int(totals.argmin()), totals.shape)
        if totals[found] >= self._late_seconds(now.link_seconds) - MIN_GAIN:
            return False
        for index in found:
            self._make(changes[int(index)])
        return True

    def _seconds(self, more: Costs, now: Costs) -> float:
        """Return the seconds that `more` costs add to a step that has the costs `now`."""
        link = now.link_seconds
        later = self._late_seconds(link + more.link_seconds) - self._late_seconds(link)
        return more.seconds + later

    def _late_seconds(self, link_seconds: float) -> float:
        return max(0.0, link_seconds - self.free_link_seconds)

    def _changes(self) -> Iterator[_Change]:
        for which, (one, counts) in enumerate(zip(self.alike, self.counts, strict=True)):
            known = one.choices.costs
            for choice, count in counts.items():
                for other, costs in known.items() if count else ():
                    if other != choice:
                        yield _Change(which, choice, other, count, costs.minus(known[choice]))

    def _make(self, change: _Change) -> None:
        if change.choice is not None and change.other is not None:
            self.counts[change.which][change.choice] -= 1
            self.counts[change.which][change.other] += 1


def _clash(changes: Sequence[_Change]) -> npt.NDArray[np.bool_]:
    """Return for each two changes whether both are of the same single group."""
    numbers: dict[tuple[int, GroupChoice | None], int] = {}
    origins = np.array([numbers.setdefault((c.which, c.choice), len(numbers)) for c in changes])
    is_only_one = np.array([change.groups < 2 for change in changes])
    clash: npt.NDArray[np.bool_] = origins[:, None] == origins[None]
    clash &= is_only_one[:, None]
    return clash
