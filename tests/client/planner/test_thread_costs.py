"""What offloading has cost the thread of late: a median, once enough was measured."""

from __future__ import annotations

import pytest
from storm_client.planner.machine import CUDA
from storm_client.planner.thread_costs import FEWEST, LATEST, ThreadCosts


def test_nothing_is_said_before_enough_was_measured_both_ways() -> None:
    costs = ThreadCosts()
    for _ in range(FEWEST):
        assert costs.seconds() is None
        costs.stored(2e-5)
    for _ in range(FEWEST):
        assert costs.seconds() is None
        costs.restored(3e-5)
    assert costs.seconds() == pytest.approx(5e-5)
    assert CUDA.with_thread_store(None) is CUDA


def test_it_is_the_median_of_the_latest() -> None:
    costs = ThreadCosts()
    for _ in range(LATEST):
        costs.stored(1.0)
        costs.restored(1.0)
    for number in range(LATEST):
        costs.stored(1.0 if number % 3 else 9e9)
        costs.restored(4.0)
    assert costs.seconds() == pytest.approx(5.0)


def test_the_figure_takes_the_place_of_the_constant() -> None:
    machine = CUDA.with_thread_store(4e-5)
    assert machine.thread_store == 4e-5
    assert machine.measured == {"thread"}
