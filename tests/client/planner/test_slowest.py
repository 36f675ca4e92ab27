"""A plan of several ranks is made from the slowest's figures, which cross the store unchanged."""

from __future__ import annotations

from dataclasses import replace

import torch
from storm_client.planner.decisions import OFFLOAD, REPLAY, Keep
from storm_client.planner.machine import CUDA, TransferFigures
from storm_client.planner.problem import PlainLoss, Problem, Value
from storm_client.planner.search import OFFLOAD_ALONE, PREDICTED, PlanSearch
from storm_client.planner.slowest import Agreed, Figures, Turn
from storm_client.planner.solver import Choice

VALUES = tuple(
    Value(number, 1 << 20, torch.float32, (512, 512), "gelu", seconds=0.25, uses=1)
    for number in range(2)
)
PROBLEM = Problem(
    VALUES, {1: "it draws"}, forward_seconds=0.5, last_bytes=100, plain_loss=PlainLoss(20, 30)
)
ONE = Figures.of(PROBLEM, CUDA, 1 << 30, [[0.1, 0.2, 0.3], [0.5]])
OTHER = replace(
    ONE,
    nbytes=(1 << 19, 1 << 21),
    seconds=(0.5, 0.125),
    forward_seconds=0.75,
    turn_seconds=0.0625,
    last_bytes=50,
    rejected={0: "its bits differ"},
    machine=replace(CUDA.with_transfers(TransferFigures(limit=1.0)), bandwidth=1.0, hides=False),
    room=1 << 20,
    plain_loss=PlainLoss(10, 40),
    steps=((0.2, 0.1, None, None),),
    lacked_bytes=30,
)


def test_figures_cross_the_store_unchanged() -> None:
    for figures in (ONE, OTHER, replace(ONE, forward_seconds=None, room=None)):
        assert Figures.from_text(figures.to_text()) == figures


def test_the_slowest_of_each_figure_is_taken_in_any_order() -> None:
    for ranks in ([ONE, OTHER], [OTHER, ONE]):
        slowest = Figures.slowest(ranks)
        assert slowest.nbytes == (1 << 20, 1 << 21)
        assert slowest.seconds == (0.5, 0.25)
        assert slowest.forward_seconds == 0.75
        assert slowest.turn_seconds == 0.0625
        assert slowest.last_bytes == 50
        assert slowest.rejected == {0: "its bits differ", 1: "it draws"}
        assert slowest.room == 1 << 20
        assert (slowest.plain_loss, slowest.lacked_bytes) == ((10, 30), 30)
        first, second = slowest.steps
        assert first == (0.2, 0.2, 0.3, None), "None is of a smaller step"
        assert second == (0.5,), "of a plan that one rank has not followed yet"
        assert slowest.machine.link == 1.0
        assert slowest.machine.bandwidth == 1.0
        assert not slowest.machine.hides
        assert slowest.machine.thread_store == CUDA.thread_store


def test_what_is_agreed_on_crosses_the_store_unchanged() -> None:
    decisions = [OFFLOAD, REPLAY, Keep("last")]
    choice = Choice(decisions, ["a", "b", "c"], [0.1, 0.2, 0.0], 3, 1, 2, 4, 5)
    search = PlanSearch(allowance=0.5, slack_bytes=7, ruled_out={OFFLOAD_ALONE})
    search.record_kept_bytes(11)
    for seconds in (3.0, 1.0, 1.0, 1.0):
        search.record_step(PREDICTED, seconds)
    turns = (Turn(PREDICTED, choice), Turn(OFFLOAD_ALONE, choice._replace(kept_bytes=5)))
    for one in (search, None):
        agreed = Agreed.from_text(Agreed(turns, one, frozenset({"link"})).to_text())
        assert agreed.turns == turns
        assert agreed.measured == {"link"}
        assert str(agreed.search) == str(one)
        assert agreed.search is None or agreed.search.ruled_out == {OFFLOAD_ALONE}
    assert agreed.search is None
