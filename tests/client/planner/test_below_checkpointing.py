"""What is kept up to the fullest moment of a step whose blocks are checkpointed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storm_client.planner.below_checkpointing import (
    STARTS,
    choose_below_checkpointing,
    is_below_checkpointing,
    room_below_checkpointing,
)
from storm_client.planner.decisions import Keep
from storm_client.planner.machine import CUDA
from storm_client.planner.problem import PlainLoss, Problem
from storm_client.planner.solver import Choice, Solver, choose
from storm_client.planner.timeline import checkpointed, kept_by_checkpointing, planned
from support.planning import alike_blocks, value

MIB = 1 << 20


def step(count: int, *, wide: int = 1, loss: int = 90, weights: int = 0) -> Problem:
    """Return a step of blocks of some hundred MiB, of which the first are `wide`, and a loss.

    Each product has `weights` MiB of parameters.
    """
    values, ends = alike_blocks(count)
    values.append(value(len(values), loss, "log_softmax", len(values) - 1, seconds=1.0))
    values = [
        replace(
            one,
            nbytes=one.nbytes * MIB * (wide if 0 < one.number <= 4 else 1),
            seconds=one.seconds * 1e-5,
            parameter_bytes=weights * MIB if one.is_expensive else 0,
        )
        for one in values
    ]
    used = {n: (n + 1, n + 1) for n in range(len(values))}
    saved = tuple(replace(one, uses=1) for one in values)
    return Problem(saved, forward_seconds=0.0, block_ends=ends, used_between=used)


def kept_bytes(problem: Problem, choice: Choice) -> int:
    return problem.nbytes(n for n, one in enumerate(choice.decisions) if isinstance(one, Keep))


def test_what_fits_below_checkpointing_is_kept() -> None:
    problem = step(12)
    found = choose_below_checkpointing(problem, CUDA)
    assert is_below_checkpointing(problem, found)
    assert kept_bytes(problem, found) > problem.checkpointed_bytes
    before = choose(problem, CUDA, budget_bytes=problem.checkpointed_bytes)
    assert found.replay_seconds < before.replay_seconds


def test_what_blocks_end_with_is_kept_though_autograd_saves_none_of_it() -> None:
    """As the sums of a residual stream, from which norms are recomputed that have more bytes."""
    problem = step(12)
    ends = problem.block_ends
    values = tuple(
        replace(
            one,
            uses=int(one.number not in ends),
            nbytes=one.nbytes * (2 if one.operation == "rms_norm" else 1),
        )
        for one in problem.values
    )
    used = {n: at for n, at in problem.used_between.items() if n not in ends}
    unsaved = replace(problem, values=values, used_between=used)
    found = choose_below_checkpointing(unsaved, CUDA)
    assert is_below_checkpointing(unsaved, found)
    assert found.link_seconds == 0.0
    assert any(isinstance(found.decisions[number], Keep) for number in ends)


def test_room_is_left_for_parameters_that_are_gathered() -> None:
    """A loss may be the fullest moment only because nothing is gathered beside it."""
    problem = step(6, loss=400)
    values = [replace(one, gathered_bytes=100 * MIB * one.is_expensive) for one in problem.values]
    gathered = replace(problem, values=tuple(values))
    assert not is_below_checkpointing(gathered, choose_below_checkpointing(problem, CUDA))
    found = choose_below_checkpointing(gathered, CUDA)
    assert is_below_checkpointing(gathered, found)
    assert kept_bytes(gathered, found) > gathered.checkpointed_bytes


@given(
    st.integers(2, 8),
    st.integers(1, 4),
    st.integers(10, 900),
    st.integers(0, 100),
    st.sampled_from([0.0, 0.01, 0.1]),
)
def test_nothing_is_given_up_that_could_stay(
    count: int, wide: int, loss: int, weights: int, forward_seconds: float
) -> None:
    """Below what checkpointing takes: with any other value kept, some moment would be fuller."""
    problem = step(count, wide=wide, loss=loss, weights=weights)
    problem = replace(problem, forward_seconds=forward_seconds)
    most, found = checkpointed(problem), choose_below_checkpointing(problem, CUDA)
    if not is_below_checkpointing(problem, found):
        before = choose(problem, CUDA, budget_bytes=problem.checkpointed_bytes)
        lacking = min(room_below_checkpointing(problem, before))
        assert lacking <= min(room_below_checkpointing(problem, found)) < 0
        return
    assert planned(problem, found.decisions).peak_bytes <= most.peak_bytes
    for one in problem.saved:
        if not isinstance(found.decisions[one.number], Keep):
            decisions = list(found.decisions)
            decisions[one.number] = Keep("budget")
            other = found._replace(decisions=decisions)
            assert not is_below_checkpointing(problem, other), one


@given(st.integers(2, 6), st.integers(1, 40), st.integers(10, 900))
def test_what_is_chosen_takes_no_longer_than_checkpointing_does(
    count: int, wide: int, loss: int
) -> None:
    """Also where one value is so large that to have it in flight leaves no room to keep others."""
    problem = step(count, wide=wide, loss=loss)
    kept = kept_by_checkpointing(problem)
    as_checkpointed = Solver(problem, CUDA).choose(0, kept=kept)
    assert (
        planned(problem, as_checkpointed.decisions).peak_bytes <= checkpointed(problem).peak_bytes
    )
    assert choose_below_checkpointing(problem, CUDA).seconds <= as_checkpointed.seconds


@pytest.mark.parametrize("forward_seconds", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("wide", [1, 3])
def test_what_is_chosen_takes_no_longer_than_any_budget_that_fits(
    forward_seconds: float, wide: int
) -> None:
    """What fits depends on the moment, so filling the memory from one side may end far from it."""
    problem = replace(step(10, wide=wide, weights=40), forward_seconds=forward_seconds)
    most, found = checkpointed(problem), choose_below_checkpointing(problem, CUDA)
    solver = Solver(problem, CUDA)
    for part in range(1, STARTS + 1):
        other = solver.choose(most.peak_bytes * part // (STARTS + 1))
        assert found.seconds <= other.seconds or not is_below_checkpointing(problem, other)


@pytest.mark.parametrize("unknown", [{"used_between": {}}, {"block_ends": frozenset()}])
def test_where_moments_are_not_known_as_much_as_of_blocks_is_kept(
    unknown: dict[str, object],
) -> None:
    problem = replace(step(4), **unknown)  # type: ignore[arg-type]
    found = choose_below_checkpointing(problem, CUDA)
    assert found == choose(problem, CUDA, budget_bytes=problem.checkpointed_bytes)
    assert not is_below_checkpointing(problem, found)


@pytest.mark.parametrize("lacked", [100, 5000])
def test_what_devices_have_lacked_is_left_free(lacked: int) -> None:
    problem = replace(step(12), plain_loss=PlainLoss(0, 600 * MIB))
    before = choose_below_checkpointing(problem, CUDA)
    found = choose_below_checkpointing(replace(problem, lacked_bytes=lacked * MIB), CUDA)
    least = choose(problem, CUDA, budget_bytes=0)
    full, less, lowest = (
        planned(problem, one.decisions).peak_bytes for one in (before, found, least)
    )
    assert less <= max(full - lacked * MIB, lowest)
    assert less < full
