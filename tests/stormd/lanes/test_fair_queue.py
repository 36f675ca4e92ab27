"""The queue of a lane: turns, order, and a retirement that comes last."""

from __future__ import annotations

import threading
from typing import TypeVar

from support.waiting import wait_until

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


def test_close_ends_every_worker_after_what_waits() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put(1, [("last", 1)])
    taken: list[object] = []

    def work() -> None:
        while (task := queue.take()) is not None:
            taken.append(task)
            queue.done(1)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    queue.close()
    for worker in workers:
        worker.join(60)
    assert taken == [(1, "last")]


def test_many_workers_take_each_job_once() -> None:
    queue: FairQueue[int] = FairQueue()
    taken: list[tuple[int, int]] = []
    retired: list[int] = []

    def work() -> None:
        while (task := queue.take()) is not None:
            session, job = task
            if job is None:
                retired.append(session)
                continue
            taken.append((session, job))
            queue.done(session)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for job in range(500):
        queue.put(job % 7, [(job, 1)])
    wait_until(lambda: len(taken) == 500)
    for session in range(7):
        queue.retire(session)
    queue.close()
    for worker in workers:
        worker.join(60)
    assert sorted(job for _, job in taken) == list(range(500))
    assert sorted(retired) == list(range(7))


def test_what_waits_can_be_had_without_waiting() -> None:
    queue: FairQueue[str] = FairQueue()
    assert queue.take_now() is None
    queue.put(1, [("a", 1)])
    assert queue.take_now() == (1, "a")
    assert queue.take_now() is None
    queue.retire(1)
    queue.done(1)
    assert queue.take_now() is None, "a retirement is no job"
    assert queue.take() == (1, None)
