from __future__ import annotations

from time import perf_counter
from types import SimpleNamespace

import pytest
from storm_client.monitoring import trace as module
from storm_client.monitoring.trace import EVERY, FIRST_STEPS, StepTrace, Traces


def made(traces: Traces | None = None) -> StepTrace:
    return StepTrace(SimpleNamespace(arrived_bytes=0), traces or Traces())


def test_what_reached_the_pool_counts_from_the_first_that_was_saved() -> None:
    pool = SimpleNamespace(arrived_bytes=100)
    trace = StepTrace(pool, Traces())
    trace.saved(1, "offloaded", 50)
    pool.arrived_bytes = 130
    trace.used(1)
    assert [moment.stored for moment in trace.timeline().moments] == [0, 0, 30]


def test_a_block_without_end_is_followed_so_far_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MOMENTS", 3)
    trace = made()
    for key in range(10):
        trace.saved(key, "kept", 1)
        trace.paused("store", perf_counter())
    timeline = trace.timeline()
    assert len(timeline.moments) == 1 + 3
    assert len(timeline.pauses) == 3


def test_the_step_that_a_backward_pass_used_last_is_shown() -> None:
    traces = Traces()
    first, second, validation = made(traces), made(traces), made(traces)
    assert traces.timeline() is None
    for trace, nbytes in ((first, 1), (second, 2), (validation, 3)):
        trace.saved(0, "kept", nbytes)
    for trace in (first, second, first):  # a graph that is kept
        trace.used(0)
    timeline = traces.timeline()
    assert timeline is not None
    assert timeline.moments[1].kept == 2


def test_after_the_first_steps_one_in_some_is_followed() -> None:
    traces = Traces()
    begun = [traces.begin(SimpleNamespace(arrived_bytes=0)) for _ in range(2 * EVERY)]
    followed = [number for number, trace in enumerate(begun, 1) if isinstance(trace, StepTrace)]
    assert followed == [*range(1, FIRST_STEPS + 1), EVERY, 2 * EVERY]
    began = perf_counter()
    begun[FIRST_STEPS].used(0)
    assert traces.timeline() is None
    assert begun[FIRST_STEPS].paused("wait", began) > 0
