"""When a signature's plan is made anew, and what is known of plans that it has followed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from storm_client.eager.comparison import Comparison
from storm_client.eager.events import SAVED, RecordedValue
from storm_client.eager.signature import StepSignature
from storm_client.planner.decisions import OFFLOAD, REPLAY, Keep
from storm_client.planner.machine import CPU
from storm_client.planner.search import PlanSearch


class Passed:
    """A forward pass of some seconds, which the device may not have ended."""

    def __init__(self, seconds: float, *, is_known: bool = True) -> None:
        self.is_known = is_known
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds


def signature(*, is_on_gpu: bool = True) -> StepSignature:
    device = torch.device("cuda", 1) if is_on_gpu else torch.device("cpu")
    value = RecordedValue(0, 100, torch.float32, torch.Size((25,)), device)
    made = StepSignature(((SAVED, 0, None, ()),), [value])
    made.follow([OFFLOAD])
    return made


def observe(made: StepSignature, seconds: Iterable[float]) -> None:
    for one in seconds:
        made.observe(Passed(one))


def planned(made: StepSignature, seconds: Iterable[float]) -> float | None:
    """Return the window of the plan that is made after such forward passes."""
    observe(made, seconds)
    window = made.times.measure()
    made.mark_planned()
    return window


def test_two_forward_passes_make_the_plan_anew() -> None:
    made = signature()
    observe(made, [3.0])
    assert not made.is_outdated
    observe(made, [2.0])
    assert made.is_outdated
    assert made.times.measure() == 2.0


def test_later_ones_change_nothing() -> None:
    """What is longer waits; what is shorter may be what another plan does."""
    made = signature()
    planned(made, [2.0, 2.0])
    observe(made, [5.0, 1.0, 1.0, 1.0])
    assert not made.is_outdated
    assert made.times.measure() == 2.0


def test_steps_settle_once_after_each_change_of_decisions() -> None:
    """What learning needed is given back then: not earlier, and not in every step."""
    made = signature(is_on_gpu=False)
    seen = []
    for decisions in ([OFFLOAD], [OFFLOAD], [Keep("budget_has_room")]):
        made.follow(decisions)
        for _ in range(4):
            seen.append(made.settles())
            made.observe(Passed(1.0))
    assert seen == [False, False, True, False, *[False] * 4, False, False, True, False]


def test_while_plans_are_compared_memory_is_given_back_once() -> None:
    made = signature()
    search = made.compare(Comparison(PlanSearch(), CPU)).search
    for number, decisions in enumerate(([OFFLOAD], [REPLAY], [OFFLOAD])):
        made.follow(decisions)
        observe(made, [1.0] * 4)
        assert made.settles() is (number == 0)
    search.is_settled = True
    assert made.settles()
    assert not made.settles()
