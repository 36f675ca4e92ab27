"""When a kind's plan is made anew for the time of its forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from storm_client.eager.signature import SAVED, Kind, RecordedValue
from storm_client.planner.decisions import OFFLOAD, Keep


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
    made = Kind(((SAVED, 0, 100, None, ()),), [value])
    made.is_outdated = False
    return made


def observe(made: Kind, seconds: Iterable[float]) -> None:
    for one in seconds:
        made.observe(Passed(one))


def planned(made: Kind, seconds: Iterable[float]) -> float | None:
    """Return the window of the plan that is made after such forward passes."""
    observe(made, seconds)
    window = made.measure()
    made.is_outdated = False
    return window


def test_two_forward_passes_make_the_plan_anew() -> None:
    made = kind()
    observe(made, [3.0])
    assert not made.is_outdated
    observe(made, [2.0])
    assert made.is_outdated
    assert made.measure() == 2.0


@pytest.mark.parametrize(
    ("later", "is_outdated"),
    [
        ([1.9, 2.1, 1.8, 1.6], False),
        ([1.0, 2.0, 1.0, 2.0], False),
        ([1.0], False),
        ([2.0, 1.4, 1.4], True),
    ],
)
def test_two_that_are_much_shorter_do_so_later(later: list[float], is_outdated: bool) -> None:
    made = kind()
    assert planned(made, [2.0, 2.0]) == 2.0
    observe(made, later)
    assert made.is_outdated is is_outdated
    assert made.measure() == (min(later[-2:]) if is_outdated else 2.0)


def test_what_is_longer_changes_nothing() -> None:
    """Waits for a link that others use are no time in which it could carry more."""
    made = kind()
    planned(made, [2.0, 2.0])
    observe(made, [5.0] * 10)
    assert not made.is_outdated
    assert made.measure() == 2.0


def test_nobody_waits_for_the_device() -> None:
    made = kind()
    planned(made, [2.0, 2.0])
    made.observe(Passed(1.0, is_known=False))
    made.observe(Passed(1.0))
    assert not made.is_outdated
    made.observe(Passed(1.0))
    assert made.is_outdated


def test_on_a_cpu_what_else_runs_there_decides() -> None:
    made = kind(is_on_gpu=False)
    assert planned(made, [2.0, 2.0]) == 2.0
    observe(made, [1.0, 1.0, 1.0])
    assert not made.is_outdated


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


def test_the_longer_of_the_latest_turns_counts_once_two_are_known() -> None:
    made = kind()
    assert made.turn_seconds() == math.inf
    made.turned(Passed(5.0))
    assert made.turn_seconds() == math.inf
    made.turned(Passed(1.0))
    assert made.turn_seconds() == 5.0
    made.turned(Passed(2.0))
    assert made.turn_seconds() == 2.0
    made.turned(Passed(0.0, is_known=False))
    assert made.turn_seconds() == math.inf  # the device has not come so far
