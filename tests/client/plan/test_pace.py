"""What steps take by the clock, from one's beginning to the next's."""

from __future__ import annotations

from itertools import accumulate

import pytest
from storm_client.plan import pace
from storm_client.plan.pace import SETTLING, STEPS, Pace


def paced(monkeypatch: pytest.MonkeyPatch, one: Pace, seconds: list[float]) -> None:
    """Have steps take so long; the last has just begun."""
    clock = accumulate([0.0, *seconds])
    monkeypatch.setattr(pace, "perf_counter", lambda: next(clock))
    for _ in range(len(seconds) + 1):
        one.begins()


def test_few_steps_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Pace()
    paced(monkeypatch, one, [1.0] * (STEPS - 1))
    assert one.seconds is None


def test_the_latest_steps_tell_and_one_that_was_held_up_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Pace()
    paced(monkeypatch, one, [9.0] * 20 + [1.0] * (STEPS - 1) + [60.0])
    assert one.seconds == 1.0


def test_the_first_steps_of_another_kind_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Pace()
    paced(monkeypatch, one, [1.0] * STEPS)
    assert one.seconds == 1.0
    one.begin_anew()
    for _ in range(SETTLING):
        one.begins()
    assert one.seconds is None
    paced(monkeypatch, one, [2.0] * STEPS)
    assert one.seconds == 2.0
