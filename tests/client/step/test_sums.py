"""`sum` of floats, and of a step's numbers, as Python computes it from 3.12 on."""

from __future__ import annotations

import math
import random
import sys

import pytest
import torch
from storm_client.step.scalars import Number, Numbers, evaluate, number_of, symbolic
from storm_client.step.sums import sum_of

LISTS = {
    "ten tenths": ([0.1] * 10, 0, 1.0),
    "a large one between": ([1.0, 1e100, 1.0, -1e100], 0, 2.0),
    "an integer carries no error": ([0.1] * 3 + [1] + [0.1] * 7, 0, 2.0),
    "from a float": ([0.1] * 10, 0.5, 1.5),
    "infinity": ([1e308, 1e308, -1e308], 0, math.inf),
    "nothing": ([], 0, 0),
    "integers": ([1, True, 2], 0, 4),
}


@pytest.mark.parametrize("name", LISTS)
def test_errors_of_rounding_are_carried_along(name: str) -> None:
    items, start, expected = LISTS[name]
    assert repr(sum_of(items, start)) == repr(expected)


def test_floats_are_followed_by_others() -> None:
    made = sum_of([0.1] * 10 + [torch.ones(2)], 0)
    assert made.tolist() == [2.0, 2.0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python adds plainly before 3.12")
def test_it_is_what_python_computes() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        items = [draw.gauss(0, 10 ** draw.randrange(-8, 17)) for _ in range(draw.randrange(9))]
        items += draw.choices([3, 1 << 60, True, -0.0, math.inf], k=draw.randrange(3))
        draw.shuffle(items)
        assert repr(sum_of(items, 0)) == repr(sum(items))


def test_numbers_of_a_step_are_added_in_each_run() -> None:
    graph = torch.fx.Graph()
    numbers = Numbers(graph, lambda _: None)
    nodes = [graph.placeholder(f"x{n}") for n in range(3)]
    made = sum_of(
        [
            symbolic(numbers, nodes[0], None),
            0.7,
            3,
            *(symbolic(numbers, one, None) for one in nodes[1:]),
        ],
        0,
    )
    behind = number_of(made)
    assert isinstance(behind, Number)
    for values in ([0.1, 0.2, 0.3], [1.0, 1e100, -1e100]):
        known = dict(zip(nodes, values, strict=True))
        expected = sum_of([values[0], 0.7, 3, *values[1:]], 0)
        assert repr(evaluate(behind.source, known)) == repr(expected)
