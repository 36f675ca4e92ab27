"""The queue of a lane: turns, order, and a retirement that comes last."""

from __future__ import annotations

import threading

from support.waiting import wait_until

from stormd.lanes.fair_queue import FairQueue


def take_all(queue: FairQueue[str], count: int) -> list[tuple[int, str | None]]:
    taken = []
    for _ in range(count):
        task = queue.take()
        assert task is not None
        taken.append(task)
    return taken


def test_sessions_take_turns_and_keep_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for job in ("a1", "a2", "a3"):
        queue.put(1, job)
    queue.put(2, "b1")
    queue.put(3, "c1")
    assert [job for _, job in take_all(queue, 5)] == ["a1", "b1", "c1", "a2", "a3"]


def test_a_session_retires_after_its_last_job() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put(1, "runs")
    queue.put(1, "waits")
    assert queue.take() == (1, "runs")
    assert queue.remove(1) == ["waits"]
    queue.retire(1)
    queue.put(2, "another")
    assert queue.take() == (2, "another")
    queue.done(1)
    assert queue.take() == (1, None)


def test_an_idle_session_retires_at_once() -> None:
    queue: FairQueue[str] = FairQueue()
    assert queue.remove(9) == []
    queue.retire(9)
    assert queue.take() == (9, None)


def test_close_ends_every_worker_after_what_waits() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put(1, "last")
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
        worker.join(10)
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
        queue.put(job % 7, job)
    wait_until(lambda: len(taken) == 500)
    for session in range(7):
        queue.retire(session)
    queue.close()
    for worker in workers:
        worker.join(10)
    assert sorted(job for _, job in taken) == list(range(500))
    assert sorted(retired) == list(range(7))
