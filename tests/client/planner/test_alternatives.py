"""The plan of each alternative: in what it differs from that by prediction."""

from __future__ import annotations

from dataclasses import replace

from storm_client.planner.alternatives import choose_alternative, kept_bytes
from storm_client.planner.decisions import REPLAY, Keep
from storm_client.planner.machine import CPU
from storm_client.planner.problem import Problem
from storm_client.planner.search import AS_BLOCKS, LADDER, PREDICTED
from storm_client.planner.solver import choose
from support.planning import value

MACHINE = replace(CPU, link=1.0, codec=0.1, thread_store=0.0, thread_recompute=0.0, unmeasured=0.05)
PROBLEM = Problem(
    (
        value(0),
        value(1, 100, "silu", 0, seconds=1.0),
        *[value(n, 100, "linear", 0, seconds=20.0 + n, expensive=True) for n in (2, 3, 4)],
    ),
    forward_seconds=350.0,
)


def decided(alternative: object, problem: Problem = PROBLEM, **more: object) -> list[object]:
    options = {"room": None, "machine": MACHINE, **more}
    choice = choose_alternative(alternative, problem, **options)  # type: ignore[arg-type]
    return list(choice.decisions)


def test_that_by_prediction_is_what_the_solver_chooses() -> None:
    assert decided(PREDICTED) == choose(PROBLEM, MACHINE).decisions
    assert decided(PREDICTED, room=250) == choose(PROBLEM, MACHINE, budget_bytes=250).decisions


def test_less_of_the_link_is_more_that_is_recomputed() -> None:
    counts = [decided(one).count(REPLAY) for one in LADDER]
    assert counts == [4, 3, 2, 1]
    assert counts == sorted(counts, reverse=True)


def test_as_much_stays_as_checkpointing_would_keep_of_what_pays_most() -> None:
    blocks = replace(PROBLEM, block_ends=frozenset({0, 1}), last_bytes=400)
    for one in AS_BLOCKS:
        found = decided(one, blocks)
        assert sum(isinstance(decision, Keep) for decision in found) == 2
        assert found.count(Keep("budget")) == 2
    counts = [decided(one, blocks).count(REPLAY) for one in AS_BLOCKS]
    assert counts == sorted(counts, reverse=True)


def test_what_stays_below_checkpointing_is_as_much_as_that_keeps() -> None:
    values = (*PROBLEM.values, value(5, 900, "silu", 4, seconds=1.0))
    used = {n: (n + 1, n + 1) for n in range(6)}
    problem = Problem(values, forward_seconds=0.0, block_ends=frozenset({1, 5}), used_between=used)
    choice = choose_alternative(AS_BLOCKS[0], problem, MACHINE, room=None)
    assert choice.kept_bytes == 1400
    assert kept_bytes(problem, choice) == problem.checkpointed_bytes == 1000
    fuller = replace(problem, block_ends=frozenset({1}))
    assert kept_bytes(fuller, choice) == 1400
