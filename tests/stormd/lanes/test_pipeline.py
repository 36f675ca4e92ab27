"""A pipeline answers every job once and in order, whatever its stages do."""

import threading
from collections.abc import Iterator

import pytest

from stormd.lanes.pipeline import Pipeline

WAIT = 10.0


class Recorder:
    """Stages that note what is asked of them; `hold` keeps `finish` waiting."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.begun = threading.Semaphore(0)
        self.hold = threading.Event()
        self.hold.set()
        self.keep = False
        self.used: list[str] = []
        self.answered = threading.Semaphore(0)

    def begin(self, job: int, scratch: str) -> None:
        if job == 13:
            raise ValueError("no such job")
        self.used.append(scratch)
        self.events.append(("begin", job))
        self.begun.release()

    def finish(self, job: int, scratch: str) -> bool:
        assert self.hold.wait(WAIT)
        if job == 17:
            raise RuntimeError("broken")
        self.events.append(("finish", job))
        self.answered.release()
        return not self.keep

    def fail(self, job: int, error: Exception) -> None:
        self.events.append((type(error).__name__, job))
        self.answered.release()

    def refuse(self, job: int) -> None:
        self.events.append(("refuse", job))
        self.answered.release()

    def kinds(self, *names: str) -> list[int]:
        return [job for name, job in self.events if name in names]


@pytest.fixture
def stages() -> Recorder:
    return Recorder()


@pytest.fixture
def pipeline(stages: Recorder) -> Iterator[Pipeline[int, str]]:
    running: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    yield running
    stages.hold.set()
    running.end()
    assert running.join(WAIT)


def take(semaphore: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        assert semaphore.acquire(timeout=WAIT)


def test_jobs_are_begun_and_finished_in_order(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    pipeline.run(lambda: pipeline.provide(["a", "b"]))
    for job in range(10):
        pipeline.put(job)
    take(stages.answered, 10)
    assert stages.kinds("begin") == stages.kinds("finish") == list(range(10))


def test_no_more_are_under_way_than_there_is_scratch(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.hold.clear()
    pipeline.run(lambda: pipeline.provide(["a", "b"]))
    for job in range(5):
        pipeline.put(job)
    take(stages.begun, 2)
    stages.hold.set()
    take(stages.answered, 5)
    under_way = most = 0
    for name, _ in stages.events:
        under_way += 1 if name == "begin" else -1
        most = max(most, under_way)
    assert most <= 2


def test_waiting_jobs_are_begun_before_the_first_wait(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.hold.clear()
    ready = threading.Event()
    pipeline.run(lambda: pipeline.provide(["a", "b", "c"]))
    pipeline.run(lambda: ready.wait(WAIT) and None)
    for job in range(3):
        pipeline.put(job)
    ready.set()
    take(stages.begun, 3)
    assert stages.kinds("finish") == []


def test_a_failing_job_is_answered_and_the_next_one_done(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    pipeline.run(lambda: pipeline.provide(["a"]))
    for job in (1, 13, 2, 17, 3):
        pipeline.put(job)
    take(stages.answered, 5)
    answers = [event for event in stages.events if event[0] != "begin"]
    assert answers == [
        ("finish", 1),
        ("ValueError", 13),
        ("finish", 2),
        ("RuntimeError", 17),
        ("finish", 3),
    ]


def test_kept_scratch_is_used_again_only_when_given_back(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.keep = True
    pipeline.run(lambda: pipeline.provide(["only"]))
    pipeline.put(1)
    pipeline.put(2)
    take(stages.answered, 1)
    assert stages.kinds("begin") == [1]
    pipeline.give_back("only")
    take(stages.answered, 1)
    pipeline.give_back("only")
    assert stages.kinds("begin") == [1, 2]


def test_a_call_is_made_when_nothing_is_under_way(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    seen: list[list[int]] = []
    called = threading.Event()
    pipeline.run(lambda: pipeline.provide(["a", "b", "c"]))
    for job in range(3):
        pipeline.put(job)
    pipeline.run(lambda: seen.append(stages.kinds("finish")))
    pipeline.run(called.set)
    assert called.wait(WAIT)
    assert seen == [[0, 1, 2]]


def test_the_end_finishes_what_runs_refuses_what_waits_and_makes_the_calls(
    stages: Recorder,
) -> None:
    pipeline: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    stages.hold.clear()
    pipeline.run(lambda: pipeline.provide(["a"]))
    pipeline.put(1)
    take(stages.begun, 1)
    pipeline.put(2)
    called = threading.Event()
    pipeline.run(called.set)
    pipeline.end()
    stages.hold.set()
    assert pipeline.join(WAIT)
    assert stages.kinds("finish") == [1]
    assert stages.kinds("refuse") == [2]
    assert called.is_set()


def test_scratch_is_all_there_at_the_end(stages: Recorder) -> None:
    pipeline: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    stages.keep = True
    pipeline.run(lambda: pipeline.provide(["a", "b"]))
    pipeline.put(1)
    take(stages.answered, 1)
    pipeline.end()
    assert pipeline.join(WAIT)
    threading.Thread(target=pipeline.give_back, args=(stages.used[0],)).start()
    assert sorted(pipeline.withdraw()) == ["a", "b"]


def test_a_job_before_any_scratch_is_refused(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    pipeline.put(1)
    take(stages.answered, 1)
    assert stages.events == [("refuse", 1)]
