"""The cheapest way to have some values, beside all that there are."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from storm_client.planner.min_cut import Held, Node, cheapest

NEVER = math.inf


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Node], list[float]]:
    nodes = []
    for place in range(draw(st.integers(1, 7))):
        sources = draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set()
        seconds = draw(st.sampled_from([0.0, 1.0, 2.5, 7.0, NEVER]))
        nodes.append(Node(1, draw(st.booleans()), seconds, tuple(sorted(sources))))
    return nodes, [draw(st.sampled_from([0.5, 2.0, 4.0, 9.0])) for _ in nodes]


def cost(nodes: list[Node], prices: list[float], recomputed: set[int]) -> float:
    """Return what it takes to have what is needed if these are recomputed where they are."""
    needed = {place for place, node in enumerate(nodes) if node.is_needed}
    total = 0.0
    for place in reversed(range(len(nodes))):
        if place in needed:
            total += nodes[place].seconds if place in recomputed else prices[place]
            needed.update(nodes[place].sources if place in recomputed else ())
    return total


@given(problems())
def test_no_choice_is_cheaper(problem: tuple[list[Node], list[float]]) -> None:
    nodes, prices = problem
    found = cheapest(nodes, prices, 48)
    subsets = ({n for n in range(len(nodes)) if bits >> n & 1} for bits in range(1 << len(nodes)))
    assert cost(nodes, prices, set(found.recomputed)) == min(
        cost(nodes, prices, subset) for subset in subsets
    )
    there = found.recomputed | found.held
    assert there.issuperset(place for place, node in enumerate(nodes) if node.is_needed)
    assert all(there.issuperset(nodes[place].sources) for place in found.recomputed)


def test_a_chain_that_is_too_long_is_parted_where_that_costs_least() -> None:
    nodes = [Node(1, is_needed=True, seconds=NEVER, sources=())]
    nodes += [Node(1, is_needed=True, seconds=1.0, sources=(n,)) for n in range(11)]
    prices = [4.0] * 12
    prices[7] = 2.0
    assert cheapest(nodes, prices, 48) == Held(frozenset(range(1, 12)), frozenset({0}))
    assert cheapest(nodes, prices, 8) == Held(frozenset(range(1, 12)) - {7}, frozenset({0, 7}))
