"""Decides which values are recomputed and which held, at the least cost, given a price for each.

A needed value is held at its price, or recomputed in the time of its operation. A recomputed value
needs all of its inputs. Recomputing a value is a project: it earns the value's price less the
operation's time, and needs other values. The projects that earn most together are those on the
source side of a minimum cut (J.-C. Picard, Maximal closure of a graph, 1976). So the result is
optimal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Held", "Node", "cheapest"]

_SOURCE, _SINK = 0, 1
_NOTHING = 1e-15
"""Seconds: a smaller difference is a rounding error."""


class Node(NamedTuple):
    """A value, and its costs."""

    nbytes: int
    is_needed: bool
    """Whether it is needed in any case; others are needed only as inputs of recomputed values."""
    seconds: float
    """Time of its operation; infinity if it cannot be recomputed."""
    sources: tuple[int, ...]
    """Its inputs, as places among the nodes; each is before its own place."""


class Held(NamedTuple):
    """The recomputed and the held ones of some nodes, by place; the others are not needed."""

    recomputed: frozenset[int]
    held: frozenset[int]


def cheapest(nodes: Sequence[Node], prices: Sequence[float], most_in_a_row: int) -> Held:
    """Return the cheapest way to provide all needed nodes, if holding a node costs its price.

    No node is recomputed by more than `most_in_a_row` operations in a row. If one would be, a node
    of its chain is held where it is needed, and the rest is chosen anew.
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
    """Return the projects that earn most together; each needs others that have to be paid for."""
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
    """Return the latter halves of chains that reach the allowed length and continue."""
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
    """Vertices and the flow between them; E. A. Dinic's algorithm of 1970."""

    count: int
    _heads: list[int] = field(default_factory=list)
    _left: list[float] = field(default_factory=list)
    """Remaining capacity of each edge. The reverse edge has the next number, or the one before."""
    _edges: list[list[int]] = field(default_factory=list)
    """Numbers of the edges that leave each vertex."""

    def __post_init__(self) -> None:
        self._edges = [[] for _ in range(self.count)]

    def join(self, tail: int, head: int, capacity: float) -> None:
        for one, other, most in ((tail, head, capacity), (head, tail, 0.0)):
            self._edges[one].append(len(self._heads))
            self._heads.append(other)
            self._left.append(most)

    def cut(self) -> set[int]:
        """Return the source's side of the minimum cut, the smallest if there are several."""
        while True:
            levels = self._levels()
            if _SINK not in levels:
                return set(levels)
            following = [0] * self.count
            while self._send(levels, following):
                pass

    def _levels(self) -> dict[int, int]:
        """Return the distance from the source of each vertex that more flow can reach."""
        levels, reached = {_SOURCE: 0}, [_SOURCE]
        for vertex in reached:
            for edge in self._edges[vertex]:
                head = self._heads[edge]
                if self._left[edge] > _NOTHING and head not in levels:
                    levels[head] = levels[vertex] + 1
                    reached.append(head)
        return levels

    def _send(self, levels: dict[int, int], following: list[int]) -> bool:
        """Send as much flow as one path can carry; return whether there was one.

        `following` has for each vertex the number of its edges that are known to lead nowhere.
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
