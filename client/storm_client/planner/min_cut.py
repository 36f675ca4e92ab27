"""Which values are recomputed and which held at the least cost, where holding each has a price.

A value that is needed is held at its price, or recomputed for its operation's, and what is
recomputed needs all that it is made from. To recompute one is a project that earns its price less
its operation's and needs other values; the projects that earn most together are those on the source
side of a minimum cut (J.-C. Picard, Maximal closure of a graph, 1976). So the choice is the best.

Everything here is pure: no tensor, device or clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Held", "Node", "cheapest"]

_SOURCE, _SINK = 0, 1
_NOTHING = 1e-15
"""Seconds below which a difference is one of rounding."""


class Node(NamedTuple):
    """A value, and what it takes to have it."""

    nbytes: int
    is_needed: bool
    """Whether it is asked for in any case; others only if what is recomputed is made from them."""
    seconds: float
    """Of its operation; infinity where it cannot be recomputed."""
    sources: tuple[int, ...]
    """What it is made from, as places among the nodes, each before its own."""


class Held(NamedTuple):
    """What is there of some nodes, as places among them; the others are not needed."""

    recomputed: frozenset[int]
    held: frozenset[int]


def cheapest(nodes: Sequence[Node], prices: Sequence[float], most_in_a_row: int) -> Held:
    """Return the cheapest way to have what is needed, where to hold a node costs its price.

    No node is recomputed by more operations in a row than `most_in_a_row`: one that would be is
    held where it is needed, and the rest chosen anew.
    """
    fixed: set[int] = set()
    while True:
        found = _cheapest(nodes, prices, fixed)
        chains = _too_long(nodes, found.recomputed, most_in_a_row)
        if not chains:
            return found
        for chain in chains:
            fixed.add(min(chain, key=lambda place: prices[place] - nodes[place].seconds))


def _cheapest(nodes: Sequence[Node], prices: Sequence[float], fixed: set[int]) -> Held:
    recomputed, needing = set[int](), dict[int, list[int]]()
    for place, node in enumerate(nodes):
        if prices[place] <= node.seconds or place in fixed:
            continue
        sources = node.sources if node.is_needed else (*node.sources, place)
        if others := [one for one in sources if not nodes[one].is_needed]:
            needing[place] = others
        else:
            recomputed.add(place)
    recomputed.update(_earning(nodes, prices, needing))
    needed = {place for place, node in enumerate(nodes) if node.is_needed}
    for place in recomputed:
        needed.update(nodes[place].sources)
    return Held(frozenset(recomputed & needed), frozenset(needed - recomputed))


def _earning(
    nodes: Sequence[Node], prices: Sequence[float], needing: Mapping[int, Iterable[int]]
) -> set[int]:
    """Return which projects earn most together, of those that need others to be had at a price."""
    made = {place: vertex for vertex, place in enumerate(needing, 2)}
    bought = set().union(*needing.values())
    had = {place: vertex for vertex, place in enumerate(sorted(bought), 2 + len(made))}
    network = _Network(2 + len(made) + len(had))
    for place, others in needing.items():
        network.join(_SOURCE, made[place], prices[place] - nodes[place].seconds)
        for one in others:
            network.join(made[place], had[one], math.inf)
    for place, vertex in had.items():
        network.join(vertex, _SINK, prices[place])
    earning = network.cut()
    return {place for place, vertex in made.items() if vertex in earning}


def _too_long(nodes: Sequence[Node], recomputed: frozenset[int], most: int) -> list[list[int]]:
    """Return the latter halves of chains that are as long as is allowed, and go on."""
    chains: list[list[int]] = []
    lengths: dict[int, int] = {}
    before: dict[int, int] = {}
    for place in sorted(recomputed):
        source = max(nodes[place].sources, key=lambda one: lengths.get(one, 0), default=-1)
        before[place] = source
        lengths[place] = 1 + lengths.get(source, 0)
        if lengths[place] > most:
            chain = [place]
            while len(chain) < most // 2:
                chain.append(before[chain[-1]])
            chains.append(chain)
            lengths[place] = 0
    return chains


@dataclass
class _Network:
    """Vertices and what may flow between them; E. A. Dinic's algorithm of 1970."""

    count: int
    _heads: list[int] = field(default_factory=list)
    _left: list[float] = field(default_factory=list)
    """What may still flow by each edge; the edge back to it has the next number, or that before."""
    _edges: list[list[int]] = field(default_factory=list)
    """Those that leave each vertex."""

    def __post_init__(self) -> None:
        """Have no edges yet."""
        self._edges = [[] for _ in range(self.count)]

    def join(self, tail: int, head: int, capacity: float) -> None:
        for one, other, most in ((tail, head, capacity), (head, tail, 0.0)):
            self._edges[one].append(len(self._heads))
            self._heads.append(other)
            self._left.append(most)

    def cut(self) -> set[int]:
        """Return the source's side of the minimum cut that has most on the sink's."""
        while True:
            levels = self._levels()
            if _SINK not in levels:
                return set(levels)
            following = [0] * self.count
            while self._send(levels, following):
                pass

    def _levels(self) -> dict[int, int]:
        """Return how far from the source each vertex is that something can still flow to."""
        levels, reached = {_SOURCE: 0}, [_SOURCE]
        for vertex in reached:
            for edge in self._edges[vertex]:
                head = self._heads[edge]
                if self._left[edge] > _NOTHING and head not in levels:
                    levels[head] = levels[vertex] + 1
                    reached.append(head)
        return levels

    def _send(self, levels: dict[int, int], following: list[int]) -> bool:
        """Send what one path can carry; tell whether there was one.

        `following` says for each vertex which of its edges led nowhere by now.
        """
        path: list[int] = []
        vertex = _SOURCE
        while vertex != _SINK:
            edges = self._edges[vertex]
            while following[vertex] < len(edges):
                edge = edges[following[vertex]]
                head = self._heads[edge]
                if self._left[edge] > _NOTHING and levels.get(head) == levels[vertex] + 1:
                    break
                following[vertex] += 1
            else:
                if not path:
                    return False
                vertex = self._heads[path.pop() ^ 1]
                following[vertex] += 1
                continue
            path.append(edge)
            vertex = head
        sent = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= sent
            self._left[edge ^ 1] += sent
        return True
