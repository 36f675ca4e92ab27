"""Groups of values whose decisions do not depend on each other, and the choices of each group.

A value and the inputs that it may be recomputed from are in one group, unless the inputs are
present in any case. So the inputs of blocks, which are not recomputed, separate one block from the
next. Prices of a kept byte and of a byte on the link give each group several choices, of which
`selection.py` takes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from storm_client.planner.min_cut import Node, cheapest
from storm_client.planner.prices import Priced

__all__ = ["LINK_SHARES", "Alike", "Choices", "Costs", "GroupChoice", "identical_groups"]

MAX_IN_A_ROW: Final = 16
"""Most operations in a row that recompute a value from a held one: all values recomputed for it may
be in memory at once."""

MAX_IN_BLOCK: Final = 48
"""The same if blocks are known: no more is in memory at once than with the blocks checkpointed."""

LINK_SHARES: Final = (0.0, 1 / 8, 1 / 2, 1.0)
"""Prices of a byte on the link that are tried, as shares of its full link time."""

DEPTH: Final = 3
"""Recursion depth of the search for prices of a kept byte between two known ones, for each
share."""

MANY_NODES: Final = 500
"""Nodes of a group from which on this depth is one: a cut takes longer then."""

TILT: Final = 0.02
"""Share by which a price rises or falls from the first value of a group to the last."""


class GroupChoice(NamedTuple):
    """The decisions for the values of one group; its values in none of the sets are not needed."""

    kept: frozenset[int]
    stored: frozenset[int]
    recomputed: frozenset[int]

    def of(self, numbers: Sequence[int]) -> GroupChoice:
        """Return the same decisions for a group whose places have these numbers."""
        return GroupChoice(*(frozenset(numbers[place] for place in places) for places in self))


class Costs(NamedTuple):
    """The costs of a choice."""

    kept_bytes: int
    link_seconds: float
    """One way."""
    seconds: float
    """All other costs: encoding, decoding, recomputing and the training thread."""


@dataclass
class Choices:
    """The possible choices for a group of values."""

    nodes: tuple[Node, ...]
    """The values, in the order in which they are made."""
    costs: dict[GroupChoice, Costs] = field(default_factory=dict)
    """The known choices with their costs, by places among the nodes."""
    _has_kept: bool = False
    """Whether choices that keep something were searched."""

    def explore(self, priced: Priced, *, keeps: bool) -> None:
        """Find the best choices at several prices; without `keeps` none of them keeps anything."""
        if self._has_kept or (self.costs and not keeps):
            return
        self._has_kept = keeps
        depth = DEPTH if len(self.nodes) < MANY_NODES else 1
        for share in LINK_SHARES:
            fewest = self._cut(priced, share, math.inf)
            if keeps:
                self._explore_between(priced, share, fewest, self._cut(priced, share, 0.0), depth)
        most, least = self._cut(priced, 0.0, math.inf), self._cut(priced, 1.0, math.inf)
        self._explore_link_shares(priced, most, least, depth)

    def _explore_between(
        self, priced: Priced, share: float, fewer: GroupChoice, more: GroupChoice, depth: int
    ) -> None:
        """Find the best choices that keep more than `fewer` and less than `more`."""
        little, much = self.costs[fewer], self.costs[more]
        nbytes = much.kept_bytes - little.kept_bytes
        if not depth or nbytes <= 0:
            return
        spared = little.seconds - much.seconds
        spared += share * (little.link_seconds - much.link_seconds)
        between = self._cut(priced, share, spared / nbytes)
        if between not in (fewer, more):
            self._explore_between(priced, share, fewer, between, depth - 1)
            self._explore_between(priced, share, between, more, depth - 1)

    def _explore_link_shares(
        self, priced: Priced, more: GroupChoice, less: GroupChoice, depth: int
    ) -> None:
        """Find choices that use the link less than `more` and more than `less`."""
        much, little = self.costs[more], self.costs[less]
        link = much.link_seconds - little.link_seconds
        if not depth or link <= 0.0:
            return
        between = self._cut(priced, (little.seconds - much.seconds) / link, math.inf)
        if between not in (more, less):
            self._explore_link_shares(priced, more, between, depth - 1)
            self._explore_link_shares(priced, between, less, depth - 1)

    def _cut(self, priced: Priced, share: float, price: float) -> GroupChoice:
        """Return the best choice if a kept byte costs `price` and link time counts by `share`.

        Equal operations cost the same per byte, and would all get the same decision. Prices differ
        a little from place to place, so that their decisions can differ.
        """
        machine = priced.machine
        rate = machine.codec + share * machine.link
        tilts = [TILT * place / len(self.nodes) for place in range(len(self.nodes))]
        storing = [
            (node.nbytes * rate + machine.thread_store) * (1.0 + tilt)
            for node, tilt in zip(self.nodes, tilts, strict=True)
        ]
        keeping = [
            node.nbytes * price * (1.0 - tilt) for node, tilt in zip(self.nodes, tilts, strict=True)
        ]
        most = MAX_IN_BLOCK if priced.problem.block_ends else MAX_IN_A_ROW
        found = cheapest(self.nodes, list(map(min, storing, keeping)), most)
        kept = frozenset(place for place in found.held if keeping[place] < storing[place])
        choice = GroupChoice(kept, found.held - kept, found.recomputed)
        self.costs.setdefault(choice, self._costs(priced, choice))
        return choice

    def _costs(self, priced: Priced, choice: GroupChoice) -> Costs:
        nodes, machine = self.nodes, priced.machine
        stored = sum(nodes[place].nbytes for place in choice.stored)
        seconds = stored * machine.codec + len(choice.stored) * machine.thread_store
        return Costs(
            sum(nodes[place].nbytes for place in choice.kept),
            stored * machine.link,
            seconds + sum(nodes[place].seconds for place in choice.recomputed),
        )


class Alike(NamedTuple):
    """Groups that have the same values in the same places."""

    choices: Choices
    """For one of the groups."""
    groups: list[list[int]]
    """The numbers of each group's values, in order."""


def identical_groups(
    priced: Priced, present: Set[int], known: dict[tuple[Node, ...], Choices]
) -> list[Alike]:
    """Return the groups of a step's values, with identical ones together.

    Values that are `present` in any case belong to no group. Choices that are `known` are reused.
    """
    sources = _sources(priced, present)
    found: dict[tuple[Node, ...], list[list[int]]] = {}
    for numbers in _connected(sources):
        places = {number: place for place, number in enumerate(numbers)}
        nodes = tuple(
            Node(
                priced.nbytes[number],
                priced.values[number].is_saved,
                priced.recompute_seconds[number] if sources[number] is not None else math.inf,
                tuple(places[one] for one in sources[number] or ()),
            )
            for number in numbers
        )
        found.setdefault(nodes, []).append(numbers)
    return [
        Alike(known.setdefault(nodes, Choices(nodes)), groups) for nodes, groups in found.items()
    ]


def _sources(priced: Priced, present: Set[int]) -> dict[int, tuple[int, ...] | None]:
    """Return each value's inputs that are not present anyway; None if it is never recomputed.

    Values that no saved value is recomputed from are left out.
    """
    found: dict[int, tuple[int, ...] | None] = {}
    waiting = [number for number in priced.saved if number not in present]
    while waiting:
        number = waiting.pop()
        if number in found:
            continue
        found[number] = None
        sources = priced.sources[number]
        if priced.is_recomputable[number]:
            found[number] = tuple(
                one for one in sources if one >= 0 and not _is_present(one, priced, present)
            )
            waiting += found[number] or ()
    return found


def _is_present(number: int, priced: Priced, present: Set[int]) -> bool:
    is_had = priced.values[number].is_saved and not priced.is_recomputable[number]
    return is_had or number in present


def _connected(sources: dict[int, tuple[int, ...] | None]) -> list[list[int]]:
    """Return the values that are connected by their inputs, each group in order.

    A value that would be recomputed from itself is set to never be recomputed, in `sources`.
    """
    ordered = _in_order(sources)
    leaders = {number: number for number in sources}

    def leader(number: int) -> int:
        while leaders[number] != number:
            leaders[number] = number = leaders[leaders[number]]
        return number

    for number, made_from in sources.items():
        for one in made_from or ():
            leaders[leader(number)] = leader(one)
    groups: dict[int, list[int]] = {}
    for number in ordered:
        groups.setdefault(leader(number), []).append(number)
    return list(groups.values())


def _in_order(sources: dict[int, tuple[int, ...] | None]) -> Iterable[int]:
    """Return the values, each after its inputs, which mostly have lower numbers.

    A value that would be recomputed from itself is set to never be recomputed, in `sources`.
    """
    done: dict[int, None] = {}
    begun: set[int] = set()
    for first in sorted(sources):
        path = [first]
        while path:
            number = path[-1]
            begun.add(number)
            before = [one for one in sources[number] or () if one not in done]
            if begun.intersection(before):
                sources[number], before = None, []
            if before:
                path.append(before[0])
            else:
                done[path.pop()] = None
    return done
