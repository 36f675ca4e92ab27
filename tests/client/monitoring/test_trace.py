from __future__ import annotations

from time import perf_counter
from types import SimpleNamespace

import pytest
from storm_client.monitoring import trace as module
from storm_client.monitoring.trace import EVERY, FIRST_STEPS, StepTrace, Traces


def made(stored: int = 0) -> StepTrace:
    return StepTrace(SimpleNamespace(arrived_bytes=stored))


def test_what_is_saved_stays_until_it_is_used() -> None:
    trace = made()
    trace.saved(1, "stays", 10)
    trace.saved(2, "offloaded", 20)
    trace.saved(3, "replayed", 40)
    trace.used(2)
    trace.used(2)
    trace.used(4)
    sums = [moment[1:4] for moment in trace.timeline().moments]
    assert sums == [(0, 0, 0), (10, 0, 0), (10, 20, 0), (10, 20, 40), (10, 0, 40)]


def test_moments_go_forward_from_the_beginning() -> None:
    trace = made()
    for key in range(5):
        trace.saved(key, "stays", 1)
    seconds = [moment.seconds for moment in trace.timeline().moments]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0.0


def test_what_reached_the_pool_counts_from_the_first_that_was_saved() -> None:
    pool = SimpleNamespace(arrived_bytes=100)
    trace = StepTrace(pool)
    trace.saved(1, "offloaded", 50)
    pool.arrived_bytes = 130
    trace.used(1)
    assert [moment.stored for moment in trace.timeline().moments] == [0, 0, 30]


def test_a_pause_is_from_its_beginning_to_now() -> None:
    trace = made()
    began = perf_counter()
    seconds = trace.paused("wait", began)
    (pause,) = trace.timeline().pauses
    assert pause.kind == "wait"
    assert pause.end - pause.begin == pytest.approx(seconds, abs=1e-6)
    assert 0 <= pause.begin <= pause.end


def test_a_block_without_end_is_followed_so_far_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MOMENTS", 3)
    trace = made()
    for key in range(10):
        trace.saved(key, "stays", 1)
        trace.paused("store", perf_counter())
    timeline = trace.timeline()
    assert len(timeline.moments) == 1 + 3
    assert len(timeline.pauses) == 3


def test_the_step_that_a_backward_pass_used_last_is_shown() -> None:
    traces, first, second, validation = Traces(), made(), made(), made()
    assert traces.timeline() is None
    for trace, nbytes in ((first, 1), (second, 2), (validation, 3)):
        trace.saved(0, "stays", nbytes)
    traces.used(first)
    traces.used(second)
    traces.used(first)  # a graph that is kept
    timeline = traces.timeline()
    assert timeline is not None
    assert timeline.moments[-1].stays == 2


def test_after_the_first_steps_one_in_some_is_followed() -> None:
    traces = Traces()
    begun = [traces.begin(SimpleNamespace(arrived_bytes=0)) for _ in range(2 * EVERY)]
    followed = [number for number, trace in enumerate(begun, 1) if isinstance(trace, StepTrace)]
    assert followed == [*range(1, FIRST_STEPS + 1), EVERY, 2 * EVERY]
    began = perf_counter()
    traces.used(begun[FIRST_STEPS])
    assert traces.timeline() is None
    assert begun[FIRST_STEPS].paused("wait", began) > 0
