"""A pipeline answers every job once and in order, whatever its stages do."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from support.waiting import wait_until

from stormd.lanes.cuda.pipeline import MAX_OVERTAKEN, Pipeline

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
        self.used: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.together = 1
        self.due = 99  # from this job on, none may be begun
        self.passing = 99  # from this job on, none passes
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
        self.used.append(scratch)
        self.batches.append(list(batch))
        self.note("begin", batch)

    def may_finish_out_of_order(self, scratch: str) -> bool:
        return str(scratch).startswith("of ")

    def is_done(self, batch: list[int], scratch: str) -> bool:
        self.looks += 1
        if not self.hold.is_set() or batch[0] >= self.passing:
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


class ForSmallOnes(Items):
    """A job from 5 on wants all of it."""

    def has_for(self, job: int) -> bool:
        return super().has_for(job) and (job < 5 or len(self) == 2)


class ForOddOnes(Items):
    """An odd job needs none of what others wait for, as long as it `may_pass`."""

    may_pass = True

    def has_for(self, job: int) -> bool:
        return super().has_for(job) or (job % 2 == 1 and self.may_pass)

    def find_overtaking_job(self, waiting: Iterable[tuple[int, int]]) -> int | None:
        places = (place for place, job in waiting if job % 2)
        return next(places, None) if self.may_pass else None

    def take(self, batch: Sequence[int]) -> str:
        return f"of {batch[0]}" if batch[0] % 2 else super().take(batch)

    def give_back(self, scratch: str) -> None:
        if not scratch.startswith("of "):
            super().give_back(scratch)


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


def put_at_once(pipeline: Pipeline[int, str], jobs: list[int]) -> None:
    """Have the thread find all of them when it looks."""
    ready = threading.Event()
    pipeline.run(lambda: ready.wait(WAIT) and None)
    for job in jobs:
        pipeline.put(job)
    ready.set()


def test_a_job_waits_for_scratch_of_its_own_and_calls_do_not(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.hold.clear()
    called = threading.Event()
    pipeline.run(lambda: pipeline.set_scratch_source(ForSmallOnes(["a", "b"])))
    pipeline.put(1)
    pipeline.follow(called.set)
    pipeline.put(5)
    pipeline.put(2)
    assert called.wait(WAIT)
    looks = stages.looks
    wait_until(lambda: stages.looks > looks + 3, WAIT)
    assert stages.kinds("begin") == [1]  # 5 wants all scratch, and 2 does not overtake it
    stages.hold.set()
    wait_until(stages.answered(3), WAIT, lambda: stages.events)
    assert stages.answers() == [("finish", 1), ("finish", 5), ("finish", 2)]


def test_what_waits_together_is_done_together(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.together = 3
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a"])))
    put_at_once(pipeline, list(range(7)))
    wait_until(stages.answered(7), WAIT, lambda: stages.events)
    assert stages.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert stages.kinds("finish") == list(range(7))


def test_a_job_that_is_not_due_waits_and_so_do_those_behind_it(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.due, stages.together = 2, 3
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a", "b"])))
    put_at_once(pipeline, list(range(5)))
    wait_until(stages.answered(2), WAIT, lambda: stages.events)
    assert stages.batches == [[0, 1]]
    stages.due = 4
    wait_until(stages.answered(4), WAIT, lambda: stages.events)
    stages.due = 5
    wait_until(stages.answered(5), WAIT, lambda: stages.events)
    assert stages.batches == [[0, 1], [2, 3], [4]]


def test_jobs_that_are_not_due_are_overtaken_by_those_that_are(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.due = 10
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a", "b"])))
    put_at_once(pipeline, [20, 21, 1, 22, 2, 3])
    wait_until(stages.answered(3), WAIT, lambda: stages.events)
    stages.due = 99
    wait_until(stages.answered(6), WAIT, lambda: stages.events)
    assert stages.kinds("begin") == stages.kinds("finish") == [1, 2, 3, 20, 21, 22]


def test_a_call_and_what_waits_for_scratch_are_not_overtaken(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.hold.clear()
    stages.due = 10
    called = threading.Event()
    pipeline.run(lambda: pipeline.set_scratch_source(ForSmallOnes(["a", "b"])))
    put_at_once(pipeline, [1, 20, 5, 2])
    pipeline.follow(called.set)
    pipeline.put(3)
    looks = stages.looks
    wait_until(lambda: stages.looks > looks + 3, WAIT)
    assert stages.kinds("begin") == [1]
    stages.hold.set()
    wait_until(stages.answered(3), WAIT, lambda: stages.events)
    assert not called.is_set()
    assert stages.kinds("begin") == [1, 5, 2]
    stages.due = 99
    wait_until(stages.answered(5), WAIT, lambda: stages.events)
    assert called.is_set()
    assert stages.kinds("begin") == [1, 5, 2, 20, 3]


def test_what_needs_no_scratch_passes_those_that_wait_for_it(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.hold.clear()
    stages.due = 20
    called = threading.Event()
    pipeline.run(lambda: pipeline.set_scratch_source(ForOddOnes(["a"])))
    put_at_once(pipeline, [0, 2, 21, 3, 4, 5, 20])
    pipeline.follow(called.set)
    pipeline.put(7)
    wait_until(lambda: len(stages.kinds("begin")) == 3, WAIT, lambda: stages.events)
    looks = stages.looks
    wait_until(lambda: stages.looks > looks + 3, WAIT)
    assert stages.kinds("begin") == [0, 3, 5]  # 21 is not due, and a call is not passed
    stages.hold.set()
    wait_until(lambda: len(stages.kinds("begin")) == 5, WAIT, lambda: stages.events)
    assert stages.kinds("begin") == [0, 3, 5, 2, 4]
    assert not called.is_set()
    stages.due = 99
    wait_until(stages.answered(8), WAIT, lambda: stages.events)
    assert called.is_set()


def test_what_goes_beside_is_answered_before_what_was_begun_before_it(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.passing = 10
    pipeline.run(lambda: pipeline.set_scratch_source(ForOddOnes(["a"])))
    for job in (20, 3, 5):
        pipeline.put(job)
    wait_until(stages.answered(2), WAIT, lambda: stages.events)
    assert stages.answers() == [("finish", 3), ("finish", 5)]
    pipeline.put(23)
    pipeline.put(7)
    wait_until(lambda: 7 in stages.kinds("begin"), WAIT, lambda: stages.events)
    looks = stages.looks
    wait_until(lambda: stages.looks > looks + 4, WAIT)
    assert stages.kinds("finish") == [3, 5]  # 7 keeps its order behind 23
    stages.passing = 99
    wait_until(stages.answered(5), WAIT, lambda: stages.events)


def test_the_end_waits_for_what_goes_beside(stages: Recorder) -> None:
    pipeline: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    stages.hold.clear()
    pipeline.run(lambda: pipeline.set_scratch_source(ForOddOnes([])))
    pipeline.put(0)
    pipeline.put(3)
    wait_until(lambda: stages.kinds("begin") == [3], WAIT, lambda: stages.events)
    pipeline.end()
    wait_until(lambda: stages.kinds("refuse") == [0], WAIT)
    looks = stages.looks
    wait_until(lambda: stages.looks > looks + 3, WAIT)
    stages.hold.set()
    assert pipeline.join(WAIT)
    assert set(stages.answers()) == {("refuse", 0), ("finish", 3)}


def test_only_so_many_are_overtaken(pipeline: Pipeline[int, str], stages: Recorder) -> None:
    """Each is asked at every look."""
    stages.due = 10
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a", "b"])))
    late = list(range(20, 20 + MAX_OVERTAKEN))
    put_at_once(pipeline, [*late, 1, 70, 2])
    wait_until(stages.answered(1), WAIT, lambda: stages.events)
    pipeline.put(3)
    stages.due = 60
    wait_until(stages.answered(len(late) + 3), WAIT, lambda: stages.events)
    assert stages.kinds("begin") == [1, *late, 2, 3]


def test_the_end_refuses_what_is_not_due(stages: Recorder) -> None:
    pipeline: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    stages.due = 1
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a"])))
    for job in range(3):
        pipeline.put(job)
    wait_until(stages.answered(1), WAIT, lambda: stages.events)
    pipeline.end()
    assert pipeline.join(WAIT)
    assert stages.answers() == [("finish", 0), ("refuse", 1), ("refuse", 2)]


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


def test_a_job_that_cannot_be_begun_costs_no_other(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.together = 4
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a", "b"])))
    put_at_once(pipeline, [1, 2, 13, 3, 4, 5])
    wait_until(stages.answered(6), WAIT, lambda: stages.events)
    assert stages.kinds("ValueError") == [13]
    assert stages.kinds("finish") == [1, 2, 3, 4, 5]
    assert stages.batches == [[1], [2], [3], [4, 5]]


def seen_in_a_call(
    queue: Callable[[Callable[[], None]], None], look: Callable[[], list[int]]
) -> list[int]:
    """Return what `look` gives in a call of the pipeline's thread."""
    seen: list[int] = []
    called = threading.Event()
    queue(lambda: seen.extend(look()))
    queue(called.set)
    assert called.wait(WAIT)
    return seen


def test_a_call_that_follows_is_made_while_those_before_are_under_way(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    stages.hold.clear()
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a", "b", "c"])))
    for job in range(2):
        pipeline.put(job)
    assert seen_in_a_call(pipeline.follow, lambda: stages.kinds("begin")) == [0, 1]
    assert stages.kinds("finish") == []
    stages.hold.set()
    wait_until(stages.answered(2), WAIT, lambda: stages.events)


def test_the_end_finishes_what_runs_refuses_what_waits_and_makes_the_calls(
    stages: Recorder,
) -> None:
    pipeline: Pipeline[int, str] = Pipeline("pipeline-under-test", stages)
    stages.hold.clear()
    pipeline.run(lambda: pipeline.set_scratch_source(Items(["a"])))
    pipeline.put(1)
    wait_until(lambda: stages.kinds("begin") == [1], WAIT, lambda: stages.events)
    pipeline.put(2)
    called = threading.Event()
    pipeline.run(called.set)
    pipeline.end()
    stages.hold.set()
    assert pipeline.join(WAIT)
    assert stages.kinds("finish") == [1]
    assert stages.kinds("refuse") == [2]
    assert called.is_set()


def test_a_job_before_any_scratch_is_refused(
    pipeline: Pipeline[int, str], stages: Recorder
) -> None:
    pipeline.put(1)
    wait_until(stages.answered(1), WAIT, lambda: stages.events)
    assert stages.events == [("refuse", 1)]


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
