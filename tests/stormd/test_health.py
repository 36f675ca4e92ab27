"""Stuck and ended workers are named, idle ones are not."""

from __future__ import annotations

import pytest

from stormd.health import Heart, stuck_workers


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_worker_is_healthy_for_ever() -> None:
    clock = Clock()
    heart = Heart("cpu-0", clock=clock)
    with heart:
        pass
    clock.now += 1e6
    assert stuck_workers([heart]) == []


def test_a_long_job_is_stuck_until_it_ends() -> None:
    clock = Clock()
    heart = Heart("cpu-0", clock=clock)
    with heart:
        clock.now += 5
        assert stuck_workers([heart], limit_seconds=5) == []
        clock.now += 1
        assert stuck_workers([heart], limit_seconds=5) == [
            "cpu-0 has been at one job for 6 s, limit 5 s"
        ]
    assert stuck_workers([heart], limit_seconds=5) == []


def test_a_job_that_raises_is_over() -> None:
    clock = Clock()
    heart = Heart("cpu-0", clock=clock)
    with pytest.raises(ZeroDivisionError), heart:
        raise ZeroDivisionError
    clock.now += 1e6
    assert stuck_workers([heart]) == []


def test_a_thread_that_ended_is_named() -> None:
    healthy, gone = Heart("cpu-0"), Heart("cpu-1")
    gone.ended("MemoryError()")
    assert stuck_workers([healthy, gone]) == ["cpu-1 has ended: MemoryError()"]
