"""The queue of a lane: turns, order, and a retirement that comes last."""

from __future__ import annotations

from typing import TypeVar

from stormd.lanes.fair_queue import JOB_BYTES, FairQueue

Job = TypeVar("Job")


def take_all(queue: FairQueue[Job], count: int) -> list[tuple[int, Job]]:
    taken = []
    for _ in range(count):
        task = queue.take()
        assert task is not None
        session, job = task
        assert job is not None
        taken.append((session, job))
    return taken


def test_what_a_job_costs_beside_its_bytes_counts() -> None:
    """Else a session with the smallest tensors would have nearly all of the workers' time."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(1000):
        queue.put(1, [("small", 100)])
        queue.put(2, [("large", 15 * JOB_BYTES)])
    taken = [job for _, job in take_all(queue, 170)]
    assert taken.count("large") == 10
