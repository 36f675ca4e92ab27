"""When copies are over on a link that is slower than the machine's."""

from __future__ import annotations

import pytest

from stormd.monitoring import link_meter
from stormd.monitoring.link_meter import LinkLimit


class Clock:
    """A time that passes where somebody sleeps, and where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(link_meter.time, "sleep", made.sleep)
    return made


def test_a_direction_carries_one_copy_after_another(clock: Clock) -> None:
    limit = LinkLimit(10, clock=clock)
    assert limit.end_time("store", 50) == 105.0
    assert limit.end_time("store", 20) == 107.0
    assert limit.end_time("restore", 10) == 101.0, "the other way is free"
    clock.now = 200.0
    assert limit.end_time("store", 10) == 201.0, "nothing is saved up"


def test_who_waits_sleeps_until_the_link_has_carried_what_is_on_it(clock: Clock) -> None:
    limit = LinkLimit(10, clock=clock)
    limit.end_time("store", 30)
    limit.wait("store", 20)
    assert clock.slept == [5.0]


def test_a_limit_that_changes_holds_for_what_begins_then(clock: Clock) -> None:
    limit = LinkLimit(1, clock=clock)
    assert limit.end_time("store", 1000) == 1100.0
    limit.change(100)
    assert limit.end_time("store", 1000) == 110.0, "an idle link"
    limit.change(0)
    assert limit.end_time("store", 1000) == 0.0
