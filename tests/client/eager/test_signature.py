"""When a kind's plan is made anew, and what is known of plans that it has followed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from storm_client.eager.signature import (
    MOST_TRIES,
    SAVED,
    Kind,
    Kinds,
    RecordedValue,
    StepRecord,
)
from storm_client.planner.decisions import OFFLOAD, REPLAY, Keep
from storm_client.planner.search import PREDICTED, Followed, PlanSearch


class Passed:
    """A forward pass of some seconds, which the device may not have ended."""

    def __init__(self, seconds: float, *, is_known: bool = True) -> None:
        self.is_known = is_known
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds


def kind(*, is_on_gpu: bool = True) -> Kind:
    device = torch.device("cuda", 1) if is_on_gpu else torch.device("cpu")
    value = RecordedValue(0, 100, torch.float32, torch.Size((25,)), device)
    made = Kind(((SAVED, 0, None, ()),), [value])
    made.is_outdated = False
    return made


def observe(made: Kind, seconds: Iterable[float]) -> None:
    for one in seconds:
        made.observe(Passed(one))


def planned(made: Kind, seconds: Iterable[float]) -> float | None:
    """Return the window of the plan that is made after such forward passes."""
    observe(made, seconds)
    window = made.times.measure()
    made.is_outdated = False
    return window


def test_two_forward_passes_make_the_plan_anew() -> None:
    made = kind()
    observe(made, [3.0])
    assert not made.is_outdated
    observe(made, [2.0])
    assert made.is_outdated
    assert made.times.measure() == 2.0


def test_later_ones_change_nothing() -> None:
    """What is longer waits; what is shorter may be what another plan does."""
    made = kind()
    planned(made, [2.0, 2.0])
    observe(made, [5.0, 1.0, 1.0, 1.0])
    assert not made.is_outdated
    assert made.times.measure() == 2.0


def test_steps_settle_once_after_each_change_of_decisions() -> None:
    """What learning needed is given back then: not earlier, and not in every step."""
    made = kind(is_on_gpu=False)
    seen = []
    for decisions in ([OFFLOAD], [OFFLOAD], [Keep("budget_has_room")]):
        made.follow(decisions)
        for _ in range(4):
            seen.append(made.settles())
            made.observe(Passed(1.0))
    assert seen == [False, False, True, False, *[False] * 4, False, False, True, False]


def test_while_plans_are_compared_memory_is_given_back_once() -> None:
    made = kind()
    made.search = PlanSearch()
    for number, decisions in enumerate(([OFFLOAD], [REPLAY], [OFFLOAD])):
        made.follow(decisions)
        observe(made, [1.0] * 4)
        assert made.settles() is (number == 0)
    made.search.is_settled = True
    assert made.settles()
    assert not made.settles()


def test_what_no_backward_pass_asks_for_is_tried_by_one_plan_alone() -> None:
    made = kind()
    made.follow([REPLAY])
    assert [made.goes_on_trying(0) for _ in range(MOST_TRIES + 1)] == [True] * MOST_TRIES + [False]
    made.follow([OFFLOAD])
    assert not made.goes_on_trying(0)


def test_what_has_proved_itself_by_a_plan_has_done_so_when_that_is_followed_again() -> None:
    made = kind()
    made.follow([REPLAY])
    made.prove(0, made.ways[0], 100)
    made.follow([OFFLOAD])
    assert not made.is_proved(0, 100)
    made.follow([REPLAY])
    assert made.is_proved(0, 100)
    assert not made.is_proved(0, 99)


def test_a_larger_step_is_news_and_is_told_as_it_would_take() -> None:
    made = kind()
    planned(made, [2.0, 2.0])
    made.values[0].seconds, made.values[0].uses = 1.0, 2
    made.follow([Keep("budget_has_room")])
    step = StepRecord(Kinds(), made, walks=True)
    assert step.decided(0, 100) == Keep("budget_has_room")
    assert step.decided(0, 101) is OFFLOAD, "the plan has no room for so much"
    for nbytes in (50, 150):
        step.saves(0, nbytes)
    made.grow(step.larger)
    assert made.is_outdated
    assert made.share(step.handed_over) == 200 / 300
    assert made.saved_bytes == 150
    assert made.values[0].planned().seconds == 1.5
    assert made.times.window == 3.0
    made.is_outdated = False
    made.grow({0: 150})
    assert not made.is_outdated


def test_a_plan_is_like_one_that_decides_the_same_and_was_measured() -> None:
    made = kind()
    made.search = PlanSearch()
    made.compared[PREDICTED] = [OFFLOAD]
    assert made.measured_like([OFFLOAD]) is None
    made.search.results[PREDICTED] = Followed(1.0, 0)
    assert made.measured_like([OFFLOAD]) is PREDICTED
    assert made.measured_like([REPLAY]) is None


def test_a_signature_that_is_learned_later_knows_what_operations_took_before() -> None:
    def values(*shapes: tuple[int, ...]) -> list[RecordedValue]:
        return [
            RecordedValue(n, 4, torch.float32, torch.Size(shape), operation="mm", inputs=(n - 1,))
            for n, shape in enumerate(shapes)
        ]

    first, second = Kind((), values((4,), (8,), (8,))), Kind((), values((4,), (8,), (16,)))
    first.values[0].seconds, first.values[1].timing = 1.0, lambda: 2.0
    first.values[2].seconds = 3.0
    second.take_times([first])
    assert [value.planned().seconds for value in second.values] == [1.0, 2.0, 0.0]
