"""What is chosen for the values of a step: replays, the link, sources, the budget."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storm_client.planner.decisions import OFFLOAD, REPLAY, Decision, Keep
from storm_client.planner.machine import CPU
from storm_client.planner.problem import Problem, Value
from storm_client.planner.solver import Choice, choose
from support.planning import value

MACHINE = replace(CPU, link=1.0, codec=0.1, thread_store=0.0, thread_recompute=0.0, unmeasured=0.05)
"""A byte takes a second on the link, a tenth of one to encode, a twentieth to recompute."""


def chosen(values: Sequence[Value], budget_bytes: int = 0, **more: Any) -> Choice:
    return choose(Problem(tuple(values), **more), MACHINE, budget_bytes=budget_bytes)


def decided(values: Sequence[Value], budget_bytes: int = 0, **more: Any) -> list[Decision]:
    return chosen(values, budget_bytes, **more).decisions


def test_a_chain_is_recomputed_from_its_beginning() -> None:
    values = [
        value(0),
        value(1, 100, "pow", 0, saved=False),
        value(2, 100, "mul", 0, 1, saved=False),
        value(3, 100, "to", 2, seconds=1.0),
    ]
    assert decided(values) == [OFFLOAD, REPLAY, REPLAY, REPLAY]


LAST = Keep("last")


def test_what_the_link_has_no_time_for_at_the_end_stays() -> None:
    values = [value(number) for number in range(4)]
    assert decided(values, forward_seconds=250.0, last_bytes=250) == [*[OFFLOAD] * 2, *[LAST] * 2]
    assert decided(values, forward_seconds=350.0, last_bytes=250) == [*[OFFLOAD] * 3, LAST]
    assert decided(values, forward_seconds=400.0, last_bytes=250) == [OFFLOAD] * 4
    assert decided(values, forward_seconds=1.0, last_bytes=199) == [*[OFFLOAD] * 3, LAST]


def test_what_the_backward_pass_begins_with_is_kept_though_it_could_be_recomputed() -> None:
    """As logits that the loss has saved: recomputed they would lie there all the same."""
    values = [value(0), value(1, 100, "silu", 0), value(2, 100, "float", 1)]
    begins = {"used_between": {0: (1, 1), 1: (2, 2), 2: (3, 3)}, "forward_seconds": 1000.0}
    assert decided(values, **begins, turn_seconds=80.0) == [OFFLOAD, REPLAY, LAST]
    assert decided(values, 100, **begins, turn_seconds=80.0) == [Keep("budget"), REPLAY, LAST]
    assert decided(values, **begins) == [OFFLOAD, REPLAY, REPLAY]  # it is not known when


def test_products_are_recomputed_only_for_what_cannot_stay_either() -> None:
    values = [value(0), *[value(n, 100, "mm", 0, seconds=20.0, expensive=True) for n in (1, 2, 3)]]
    options = {"forward_seconds": 200.0}
    assert decided(values, **options, last_bytes=200) == [*[OFFLOAD] * 2, *[LAST] * 2]
    assert decided(values, **options, last_bytes=100).count(REPLAY) == 1
    assert decided(values, **options).count(REPLAY) == 2


def test_the_budget_keeps_what_costs_most_otherwise() -> None:
    values = [value(0), value(1), value(2, 100, "silu", 0)]
    choice = chosen(values, budget_bytes=100)
    assert choice.decisions == [OFFLOAD, Keep("budget"), REPLAY]  # what is needed first stays
    assert choice.kept_bytes == 100
    everything = chosen(values, budget_bytes=300)
    assert everything.decisions == [Keep("budget")] * 3
    assert everything.link_seconds == everything.replay_seconds == 0


def test_the_budget_keeps_what_others_are_recomputed_from() -> None:
    """Though autograd does not save it; but only as long as something is recomputed from it."""
    norms = [value(number, 100, "norm", 0, seconds=1.0) for number in (1, 2)]
    values = [value(0, saved=False), *norms]
    assert decided(values) == [OFFLOAD, REPLAY, REPLAY]
    assert decided(values, 100) == [Keep("budget"), REPLAY, REPLAY]
    assert decided(values, 200) == [OFFLOAD, Keep("budget"), Keep("budget")]


@st.composite
def steps(draw: st.DrawFn) -> list[Value]:
    values = []
    for number in range(draw(st.integers(1, 9))):
        inputs = draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else []
        values.append(
            value(
                number,
                draw(st.integers(1, 50)),
                draw(st.sampled_from(["", "exp", "mul"])),
                *inputs,
                saved=draw(st.booleans()),
                seconds=draw(st.floats(0.01, 60)),
                expensive=draw(st.booleans()),
            )
        )
    return values


@given(steps(), st.integers(0, 200), st.floats(0.1, 300))
def test_what_is_recomputed_rests_on_what_is_there(
    values: list[Value], room: int, window: float
) -> None:
    choice = chosen(values, budget_bytes=room, forward_seconds=window)
    assert choice.kept_bytes <= room
    for one, decision in zip(values, choice.decisions, strict=True):
        if decision != REPLAY:
            continue
        assert one.operation
        for source in one.inputs:
            is_there = choice.reasons[source] != "not saved"
            assert is_there, (one, choice)


@given(steps(), st.integers(0, 200))
def test_a_larger_budget_keeps_no_less(values: list[Value], room: int) -> None:
    kept = [chosen(values, budget_bytes=each).kept_bytes for each in (0, room, 1000)]
    assert kept[0] == 0
    assert kept[1] <= kept[2] == sum(one.nbytes for one in values if one.is_saved)


def step_seconds(values: Sequence[Value], choice: Choice, window: float) -> float:
    """Return what giving up and getting back costs by the planner's own model."""
    shipped = sum(
        one.nbytes
        for one, decision, reason in zip(values, choice.decisions, choice.reasons, strict=True)
        if decision == OFFLOAD and reason != "not saved"
    )
    processor = shipped * MACHINE.codec + choice.replay_seconds
    return processor + max(0.0, shipped * MACHINE.link - window)


@pytest.mark.parametrize("room", [0, 100, 200])
@pytest.mark.parametrize("window", [50.0, 200.0, 400.0])
def test_it_is_close_to_the_best_of_all_choices(window: float, room: int) -> None:
    """Of a small block: a norm, three products, an activation and their product."""
    values = [
        value(0, 40),
        value(1, 40, "rms_norm", 0, seconds=1.0),
        value(2, 110, "linear", 1, seconds=24.0, expensive=True),
        value(3, 110, "linear", 1, seconds=24.0, expensive=True),
        value(4, 110, "silu", 2, seconds=3.0),
        value(5, 110, "mul", 4, 3, seconds=4.0),
        value(6, 40, "linear", 5, seconds=24.0, expensive=True),
    ]
    best = math.inf
    for ways in product("ksm", repeat=len(values)):  # kept, shipped, recomputed
        if ways[0] == "m":
            continue
        kept = sum(v.nbytes for v, way in zip(values, ways, strict=True) if way == "k")
        shipped = sum(v.nbytes for v, way in zip(values, ways, strict=True) if way == "s")
        spent = sum(v.seconds for v, way in zip(values, ways, strict=True) if way == "m")
        if kept <= room:
            waits = max(0.0, shipped * MACHINE.link - window)
            best = min(best, shipped * MACHINE.codec + spent + waits)
    choice = chosen(values, budget_bytes=room, forward_seconds=window)
    assert step_seconds(values, choice, window) <= 1.05 * best


def test_a_chain_without_end_is_not_followed_to_its_beginning() -> None:
    values = [value(0), *(value(n, 100, "add", n - 1, saved=False) for n in range(1, 2000))]
    values.append(value(2000, 100, "exp", 1999))
    assert decided(values)[-1] == OFFLOAD


@pytest.mark.timeout(60)
def test_values_that_rest_on_each_other_crosswise_are_planned() -> None:
    """Each step of a recurrence takes both results of the step before, and saves none."""
    values = [value(0, saved=False), value(1, saved=False)]
    for n in range(2, 200):
        inputs = (n - 2, n - 1) if n % 2 == 0 else (n - 3, n - 2)
        values.append(value(n, 100, "add", *inputs, saved=False))
    values.append(value(200, 100, "exp", 199, 198))
    choice = chosen(values, budget_bytes=50)
    assert choice.decisions[-1] == OFFLOAD


def test_chains_do_not_grow_behind_what_rests_on_them() -> None:
    """What rests on a stored value is recomputed from it, and it not from much else later."""
    values = [value(0)]
    values += [value(n, 100, "linear", n - 1, seconds=1.0, expensive=True) for n in range(1, 60)]
    choice = chosen(values, forward_seconds=0.0)
    longest = run = 0
    for decision in choice.decisions:
        run = run + 1 if decision == REPLAY else 0
        longest = max(longest, run)
    assert 8 <= longest <= 16


def test_a_step_of_many_sizes_takes_little_memory_to_plan() -> None:
    """As of a loop over ever longer inputs: no two values are alike."""
    values = [value(number, 1000 + number) for number in range(1000)]
    tracemalloc.start()
    try:
        choice = chosen(values, budget_bytes=500_000)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert choice.kept_bytes <= 500_000
    assert most < 4 << 20
