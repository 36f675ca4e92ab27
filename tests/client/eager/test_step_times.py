"""What the steps of one signature took: what is known of it, and when."""

from __future__ import annotations

import math

from storm_client.eager.step_times import StepTimes
from storm_client.planner.search import OFFLOAD_ALONE, PREDICTED


class Passed:
    """Some seconds, which the device may not have come to."""

    def __init__(self, seconds: float, *, is_known: bool = True) -> None:
        self.is_known = is_known
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds


def on_gpu() -> StepTimes:
    return StepTimes(is_on_gpu=True)


def test_the_longer_of_the_latest_turns_counts_once_two_are_known() -> None:
    made = on_gpu()
    assert made.turn_seconds() == math.inf
    made.record_turn(Passed(5.0))
    assert made.turn_seconds() == math.inf
    made.record_turn(Passed(1.0))
    assert made.turn_seconds() == 5.0
    made.record_turn(Passed(2.0))
    assert made.turn_seconds() == 2.0
    made.record_turn(Passed(0.0, is_known=False))
    assert made.turn_seconds() == math.inf  # the device has not come so far


def test_the_window_is_what_the_device_computes_where_its_queue_was_full() -> None:
    """Which passes that wait for the thread say nothing of."""
    made = on_gpu()
    assert not made.wants_full_queue, "it is not known for how long"
    made.pass_seconds = 0.1
    assert made.wants_full_queue
    made.record_full_queue(Passed(0.3))
    assert not made.wants_full_queue
    assert made.busy_seconds() is None, "what the passes take as they are is not known yet"
    assert not made.observe(Passed(1.0))
    assert made.observe(Passed(1.1))
    assert made.busy_seconds() == 0.3
    assert made.window == 1.0


def test_a_queue_that_the_thread_did_not_fill_tells_no_more_than_other_passes() -> None:
    made = on_gpu()
    made.record_full_queue(Passed(1.3))
    for _ in range(2):
        made.observe(Passed(1.0))
    assert made.busy_seconds() == 1.0


def test_steps_are_told_in_their_order_once_the_device_has_come_so_far() -> None:
    made, late = on_gpu(), Passed(2.0, is_known=False)
    made.record_step(PREDICTED, Passed(1.0))
    made.record_step(OFFLOAD_ALONE, late)
    made.record_step(PREDICTED, None)  # of a smaller one
    assert list(made.known_steps()) == [(PREDICTED, 1.0)]
    assert list(made.known_steps()) == []
    late.is_known = True
    assert list(made.known_steps()) == [(OFFLOAD_ALONE, 2.0), (PREDICTED, None)]
