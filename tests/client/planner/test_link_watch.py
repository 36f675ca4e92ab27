"""When a plan is made anew since its link has become faster or slower."""

from __future__ import annotations

import pytest
from storm_client.planner.link_watch import FIRST_STEPS, MAX_STEPS, LinkWatch


@pytest.fixture
def watch() -> LinkWatch:
    made = LinkWatch()
    made.planned(1.0)
    return made


def steps_until_called(watch: LinkWatch, link: float, most: int = 2 * MAX_STEPS) -> int | None:
    due = (step for step in range(1, most) if watch.is_due())
    calls = (step for step in due if watch.needs_new_plan(link, is_used=True))
    return next(calls, None)


@pytest.mark.parametrize("link", [0.81, 1.0, 1.24])
def test_little_changes_nothing(watch: LinkWatch, link: float) -> None:
    assert steps_until_called(watch, link) is None


@pytest.mark.parametrize("link", [0.5, 0.79, 1.26, 2.0])
def test_what_is_much_slower_or_faster_has_a_plan_made_once(watch: LinkWatch, link: float) -> None:
    assert steps_until_called(watch, link) == FIRST_STEPS
    assert steps_until_called(watch, link) is None


def test_a_link_that_never_rests_has_few_plans_made(watch: LinkWatch) -> None:
    steps = [steps_until_called(watch, link) for link in (2.0, 1.0) * 6]
    assert steps[:3] == [FIRST_STEPS, 2 * FIRST_STEPS, 4 * FIRST_STEPS]
    assert steps[-2:] == [MAX_STEPS, MAX_STEPS]


def test_without_a_plan_there_is_none_to_be_made_anew() -> None:
    assert steps_until_called(LinkWatch(), 1.0) is None


def test_what_sends_nothing_minds_no_slower_link(watch: LinkWatch) -> None:
    steps = range(2 * FIRST_STEPS)
    assert not any(watch.is_due() and watch.needs_new_plan(2.0, is_used=False) for _ in steps)
    assert watch.needs_new_plan(0.5, is_used=False)
