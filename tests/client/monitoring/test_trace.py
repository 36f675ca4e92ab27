"""How much of which steps is followed, for the picture of one."""

from __future__ import annotations

from time import perf_counter
from types import SimpleNamespace

import pytest
from storm_client.monitoring import trace as module
from storm_client.monitoring.trace import EVERY, FIRST_STEPS, StepTrace, Traces


def test_a_block_without_end_is_followed_so_far_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MOMENTS", 3)
    trace = StepTrace(SimpleNamespace(arrived_bytes=0), Traces())
    for key in range(10):
        trace.saved(key, "kept", 1)
        trace.paused("store", perf_counter())
    timeline = trace.timeline()
    assert len(timeline.moments) == 1 + 3
    assert len(timeline.pauses) == 3


def test_after_the_first_steps_one_in_some_is_followed() -> None:
    traces = Traces()
    begun = [traces.begin(SimpleNamespace(arrived_bytes=0)) for _ in range(2 * EVERY)]
    followed = [number for number, trace in enumerate(begun, 1) if isinstance(trace, StepTrace)]
    assert followed == [*range(1, FIRST_STEPS + 1), EVERY, 2 * EVERY]
    began = perf_counter()
    begun[FIRST_STEPS].used(0)
    assert traces.timeline() is None
    assert begun[FIRST_STEPS].paused("wait", began) > 0
