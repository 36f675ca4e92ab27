"""How far the choice is from the best one, which a MILP solver finds.

A step is some Llama blocks with a GPU's figures. `bench.planner_optimum` does the same with steps
that were recorded.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from storm_client.planner.machine import CUDA
from storm_client.planner.problem import Problem, Value
from storm_client.planner.repeated_blocks import repeated_ends
from storm_client.planner.solver import choose
from support.planning import value

pytest.importorskip("scipy")
from bench.planner_optimum import cost_of, optimum

MIB = 1 << 20
MACHINE = replace(CUDA, thread_store=2e-5).compressing(1.42)

STEP = 3.0
"""Forward passes that a step takes without offload."""

WORST = 1.005
"""Times the best step: what a choice may take."""

BLOCKS = 6
SOLVER_SECONDS = 20.0
"""At the most; it takes one or two. What it then returns is a bound of the best."""


def block(first: int, entering: int, *, length: int = 8192, width: int = 2048) -> list[Value]:
    """Return the values of a block of bfloat16, whose input has the number `entering`."""
    row = 2 * length
    product = 2.0 * length / 6e14  # seconds for a weight

    def made(
        place: int, width: int, operation: str, *inputs: int, weights: int = 0, saved: bool = True
    ) -> Value:
        seconds = weights * product if weights else 3 * row * width / 4e12
        return value(
            first + place,
            row * width,
            operation,
            *inputs,
            saved=saved,
            seconds=seconds,
            expensive=weights > 0,
        )

    hidden = 4 * width
    return [
        made(0, width, "rms_norm", entering),
        made(1, width, "linear", first, weights=width * width),
        made(2, width, "linear", first, weights=width * width),
        made(3, width, "attention", first + 1, first + 2, weights=2 * length * width // 2),
        made(4, width, "linear", first + 3, weights=width * width, saved=False),
        made(5, width, "add", entering, first + 4, saved=False),
        made(6, width, "rms_norm", first + 5),
        made(7, hidden, "linear", first + 6, weights=width * hidden),
        made(8, hidden, "silu", first + 7),
        made(9, hidden, "mul", first + 7, first + 8),
        made(10, width, "linear", first + 9, weights=width * hidden, saved=False),
        made(11, width, "add", first + 5, first + 10),
    ]


def step() -> tuple[list[Value], frozenset[int]]:
    """Return the values of a step, and those that its blocks end with."""
    values, ends = [value(0, 32 * MIB, "")], set()
    for _ in range(BLOCKS):
        values += block(len(values), values[-1].number)
        ends.add(values[-1].number)
    return values, frozenset(ends)


@pytest.mark.parametrize("window", [0.3, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("link", [1.0, 4.6], ids=["55 GB/s", "12 GB/s"])
def test_a_step_takes_hardly_longer_than_with_the_best_choice(
    window: float, share: float, link: float
) -> None:
    values, ends = step()
    whole = sum(one.seconds for one in values)
    problem = Problem(tuple(values), forward_seconds=window * whole, block_ends=ends)
    machine = replace(MACHINE, link=link * MACHINE.link)
    room = int(share * sum(one.nbytes for one in problem.saved))
    choice = choose(problem, machine, budget_bytes=room)
    found = cost_of(choice, values, machine, window * whole)
    fixed = [replace(one, operation="") if one.number in ends else one for one in values]
    best, _ = optimum(fixed, machine, room, window * whole, SOLVER_SECONDS)
    assert STEP * whole + found <= WORST * (STEP * whole + best)


@pytest.mark.parametrize("link", [1.0, 4.6], ids=["55 GB/s", "12 GB/s"])
def test_where_no_layer_has_a_name_blocks_are_found(link: float) -> None:
    """The best choice may recompute what they end with."""
    values, ends = step()
    whole = sum(one.seconds for one in values)
    found = repeated_ends(values)
    assert len(found) >= len(ends) - 1
    problem = Problem(tuple(values), forward_seconds=whole, block_ends=found)
    machine = replace(MACHINE, link=link * MACHINE.link)
    taken = cost_of(choose(problem, machine), values, machine, whole)
    best, _ = optimum(values, machine, 0, whole, SOLVER_SECONDS)
    assert STEP * whole + taken <= 1.02 * (STEP * whole + best)
