"""A pipeline answers every job once and in order, whatever its stages do."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from support.waiting import wait_until

from stormd.lanes.cuda.pipeline import Pipeline

WAIT = 60.0
BROKEN = (13, 17, 19)


class Recorder:
    """Stages that note what is asked of them; a batch is at its first stage, then at its second.

    The device does nothing while `hold` is clear. Jobs up to `together` share a batch. Job 13
    cannot be begun, 17 breaks the device in its first stage and 19 what follows.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.batches: list[list[int]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.together = 1
        self.due = 99  # from this job on, none may be begun
        self.looks = 0
        self.seconds: set[str] = set()

    def is_due(self, job: int) -> bool:
        return job < self.due

    def fits(self, batch: list[int], job: int) -> bool:
        return len(batch) < self.together

    def begin(self, batch: list[int], scratch: str) -> None:
        assert scratch not in self.seconds
        if 13 in batch:
            raise ValueError("no such job")
        self.batches.append(list(batch))
        self.note("begin", batch)

    def may_finish_out_of_order(self, scratch: str) -> bool:
        return False

    def is_done(self, batch: list[int], scratch: str) -> bool:
        self.looks += 1
        if not self.hold.is_set():
            return False
        if 17 in batch:
            raise RuntimeError("broken")
        return True

    def advance(self, batch: list[int], scratch: str) -> bool:
        if scratch in self.seconds:
            self.seconds.remove(scratch)
            self.note("finish", batch)
            return True
        if 19 in batch:
            raise KeyError("broken")
        self.seconds.add(scratch)
        return False

    def settle(self) -> None:
        self.events.append(("settle", 0))

    def fail(self, batch: list[int], scratch: str, error: Exception) -> None:
        self.seconds.discard(scratch)
        self.note(type(error).__name__, batch)

    def refuse(self, job: int) -> None:
        self.note("refuse", [job])

    def note(self, name: str, batch: list[int]) -> None:
        self.events.extend((name, job) for job in batch)

    def kinds(self, *names: str) -> list[int]:
        return [job for name, job in self.events if name in names]

    def answers(self) -> list[tuple[str, int]]:
        return [event for event in self.events if event[0] not in {"begin", "settle"}]

    def answered(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.answers()) == count


class Items(list[str]):
    """Scratch by name."""

    def has_for(self, job: int) -> bool:
        return bool(self)

    def find_overtaking_job(self, waiting: Iterable[tuple[int, int]]) -> int | None:
        return None

    def take(self, batch: Sequence[int]) -> str:
        return self.pop()

    def give_back(self, scratch: str) -> None:
        self.append(scratch)


@pytest.fixture
def stages() -> Recorder:
    return Recorder()


@pytest.fixture
def pipeline(stages: Recorder) -> Iterator[Pipeline[int, str]]:
    running: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    yield running
    stages.hold.set()
    stages.due = 99
    running.end()
    assert running.join(WAIT)
    assert not running.heartbeat.trouble(0.0)


def test_a_failing_job_is_answered_and_the_next_one_done(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a"])))
    for job in (1, 13, 2, 17, 3, 19, 4):
        pipeline.put(job)
    wait_until(stages.answered(7), WAIT, lambda: stages.events)
    assert stages.answers() == [
        ("finish", 1),
        ("ValueError", 13),
        ("finish", 2),
        ("RuntimeError", 17),
        ("finish", 3),
        ("KeyError", 19),
        ("finish", 4),
    ]
    for broken in BROKEN:
        place = next(
            n for n, (name, job) in enumerate(stages.events) if job == broken and "Err" in name
        )
        assert stages.events[place - 1] == ("settle", 0)


def test_the_end_finishes_what_runs_refuses_what_waits_and_makes_the_calls(
    stages: Recorder,
) -> None:
    pipeline: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    stages.hold.clear()
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a"])))
    pipeline.put(1)
    wait_until(lambda: stages.kinds("begin") == [1], WAIT, lambda: stages.events)
    pipeline.put(2)
    pipeline.put(99)  # is not due
    called = threading.Event()
    pipeline.run(called.set)
    pipeline.end()
    stages.hold.set()
    assert pipeline.join(WAIT)
    assert stages.kinds("finish") == [1]
    assert stages.kinds("refuse") == [2, 99]
    assert called.is_set()


def test_a_copy_that_does_not_end_is_seen_and_a_client_that_waits_is_not(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a"])))
    stages.hold.clear()
    pipeline.put(1)
    wait_until(lambda: stages.kinds("begin") == [1], WAIT, lambda: stages.events)
    assert pipeline.heartbeat.is_resting
    real = stages.advance

    def hold_then(batch: list[int], scratch: str) -> bool:
        stages.hold.clear()
        return real(batch, scratch)

    stages.advance = hold_then  # type: ignore[method-assign]
    stages.hold.set()
    wait_until(lambda: "at one job" in pipeline.heartbeat.trouble(0.0), WAIT)
    stages.hold.set()
    wait_until(stages.answered(1), WAIT, lambda: stages.events)
    wait_until(lambda: pipeline.heartbeat.is_resting, WAIT)


@pytest.mark.parametrize("breaks", ["is_due", "fits", "settle"])
def test_a_thread_that_breaks_answers_all_there_is_and_all_that_comes(
    stages: Recorder, breaks: str
) -> None:
    """At job 50: it has been taken, others are in flight, some wait, and more come."""
    real = getattr(stages, breaks)
    broken = threading.Event()

    def fails(*arguments: object) -> object:
        if not broken.is_set() and (50 in arguments or breaks == "settle"):
            broken.set()
            raise SystemExit("no more")
        return real(*arguments)

    setattr(stages, breaks, fails)
    stages.together = 2
    pipeline: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    pipeline.run(lambda: pipeline.set_scratch_source(Items("abcd")))
    stages.hold.clear()
    pipeline.put(1)
    wait_until(lambda: stages.kinds("begin") == [1], WAIT)
    stages.due = 2  # so that the next wait together
    last = 13 if breaks == "settle" else 50  # 13 cannot be begun, and then the device is settled
    for job in (2, last, 3):
        pipeline.put(job)
    wait_until(lambda: pipeline._items.is_empty or broken.is_set(), WAIT)
    stages.due = 99
    assert broken.wait(WAIT)
    called = threading.Event()
    pipeline.put(4)
    pipeline.run(called.set)
    pipeline.put(5)
    assert called.wait(WAIT)
    wait_until(stages.answered(6), WAIT, lambda: stages.events)
    assert {job for _, job in stages.answers()} == {1, 2, 3, 4, 5, last}
    assert "has ended: SystemExit: no more" in pipeline.heartbeat.trouble()
    pipeline.end()
    assert pipeline.join(WAIT)
