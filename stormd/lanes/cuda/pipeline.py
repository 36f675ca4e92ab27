"""Jobs that a device works on in order, several at once: begun one after another, finished so.

Every job is answered exactly once. Jobs begin in the order in which they were put, except that a
job which waits for scratch does not delay jobs that need none of that kind. Jobs finish in the
order in which they were begun, except for a few beside the others that have an order of their own.
No more jobs are in flight than there is scratch for. The thread begins all jobs that are due and
have scratch before it sleeps.

Small jobs that wait together form a batch. They share scratch and the work that the device has for
a batch of any size. The thread does not wait inside the driver, which costs more CPU time than
polling (DESIGN.md has the measurement). It polls the device whenever it has something to do, and
otherwise several times a millisecond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from stormd.lanes.cuda.inbox import Inbox
from stormd.monitoring.health import Heartbeat

__all__ = ["Pipeline", "ScratchSource", "Stages"]

log = logging.getLogger(__name__)

MIN_POLL_SECONDS: Final = 0.0001
"""Seconds until the device is polled again; doubled each time that nothing has happened."""

MAX_POLL_SECONDS: Final = 0.0004
"""Most seconds between polls, for which the link's next work may wait. With less, polling for a
client that lets us wait takes more than a few hundredths of a CPU."""

IDLE_POLLS: Final = 2500
"""Polls without a result, about a second of them, after which the client is assumed to be idle: it
evaluates, or waits in a debugger. Then polls are rarer."""

IDLE_POLL_SECONDS: Final = 0.01

MAX_OVERTAKEN: Final = 16
"""Most jobs behind a waiting one that may overtake it, if due: each is checked at every poll."""

Job = TypeVar("Job")
Job_contra = TypeVar("Job_contra", contravariant=True)
Scratch = TypeVar("Scratch")
Scratch_contra = TypeVar("Scratch_contra", contravariant=True)


class Stages(Protocol[Job, Scratch_contra]):
    """The steps of a batch of jobs. Those up to `advance` may raise; `settle` and `fail` follow.

    If a batch of several jobs cannot be begun, each of its jobs is tried alone before it fails.
    """

    def is_due(self, job: Job) -> bool:
        """Return whether the job may be begun; until it may, no job behind it is."""

    def fits(self, batch: list[Job], job: Job) -> bool:
        """Return whether the job may be done together with those of `batch`, which is not empty."""

    def begin(self, batch: list[Job], scratch: Scratch_contra) -> None:
        """Put the batch's work on the device, without waiting for it."""

    def may_finish_out_of_order(self, scratch: Scratch_contra) -> bool:
        """Return whether this begun batch may finish before batches begun earlier."""

    def is_done(self, batch: list[Job], scratch: Scratch_contra, /) -> bool:
        """Return whether the device has done the batch's work that was put on it last."""

    def advance(self, batch: list[Job], scratch: Scratch_contra) -> bool:
        """Answer the jobs and return True, or put the next work on the device and return False.

        Called once `is_done` has returned True. The jobs left in `batch` afterwards are those still
        to be answered.
        """

    def settle(self) -> None:
        """Wait until the device uses no scratch, including that of a batch begun only in part."""

    def fail(self, batch: list[Job], scratch: Scratch_contra, error: Exception) -> None:
        """Answer jobs that failed."""

    def refuse(self, job: Job) -> None:
        """Answer a job that was never begun."""


class ScratchSource(Protocol[Job_contra, Scratch]):
    """The source of scratch for the batches in flight. No method may raise."""

    def has_for(self, job: Job_contra) -> bool:
        """Return whether there is scratch for any batch that begins with the job.

        There must be some for every job when no batch is in flight.
        """

    def find_overtaking_job(self, waiting: Iterable[tuple[int, Job_contra]]) -> int | None:
        """Return the place of a job that does not need the scratch that an earlier job waits for.

        None if none of the given jobs is like that, or if there is no scratch for it now. No other
        job fits into such a job's batch.
        """

    def take(self, batch: Sequence[Job_contra]) -> Scratch:
        """Return scratch for a batch; `has_for` was True for its first job."""

    def give_back(self, scratch: Scratch) -> None:
        """Take back the scratch of a batch."""


class _Call(NamedTuple):
    """What the thread calls once all earlier jobs are begun, or finished with `when_finished`."""

    action: Callable[[], None]
    when_finished: bool


class Pipeline(Generic[Job, Scratch]):
    """One thread that runs jobs through `stages`, as many batches at one time as have scratch.

    It also takes calls, which it makes between jobs: once the jobs before are finished (`run`) or
    begun (`follow`). Calls must not raise. `heartbeat` says that batches past their first stage
    advance: the first stage may wait for the client, no later one may.
    """

    def __init__(self, name: str, stages: Stages[Job, Scratch]) -> None:
        self.heartbeat = Heartbeat(name)
        self._stages = stages
        self._scratch_source: ScratchSource[Job, Scratch] | None = None
        self._items: Inbox[Job | _Call | None] = Inbox()
        self._skip = threading.Event()
        self._stopped = threading.Event()
        # Used only by the thread. Batches are in the order in which the device does them.
        self._pending: deque[Job | _Call | None] = deque()
        self._begun: deque[tuple[list[Job], Scratch]] = deque()
        self._out_of_order: deque[tuple[list[Job], Scratch]] = (
            deque()
        )  # begun, in an order of their own
        self._continued: deque[tuple[list[Job], Scratch]] = deque()
        self._taken: list[Job] = []  # taken out of `_pending`, and not begun
        self._alone = 0  # how many of the next jobs are tried alone, as one of them fails
        self._pause = MIN_POLL_SECONDS
        self._idle_polls = 0  # polls since there was anything to do
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- from any thread --------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """Queue a job."""
        self._items.put(job)

    def run(self, action: Callable[[], None]) -> None:
        """Queue a call, to be made once all jobs before it are finished."""
        self._items.put(_Call(action, when_finished=True))

    def follow(self, action: Callable[[], None]) -> None:
        """Queue a call, to be made once all jobs before it have been begun."""
        self._items.put(_Call(action, when_finished=False))

    def end(self) -> None:
        """Refuse the waiting jobs, finish those in flight, make the calls, then end the thread."""
        self._skip.set()
        self._items.put(None)

    def stop(self) -> None:
        """Begin no more jobs, leave those in flight unanswered, and end the thread.

        By then the device has done the work that was put on it.
        """
        self._stopped.set()
        self._items.put(None)

    @property
    def is_stopped(self) -> bool:
        """Whether the pipeline ends because of `stop`."""
        return self._stopped.is_set()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; return False if it still runs after `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- from the pipeline's own thread, in a call ------------------------------------------

    def set_scratch_source(self, source: ScratchSource[Job, Scratch]) -> None:
        """Take scratch from `source` from now on. Jobs before the first source are refused."""
        self._scratch_source = source

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            log.exception("a pipeline has ended")
            reason = f"{type(error).__name__}: {error}"
            self.heartbeat.ended(reason)
            self._give_up(RuntimeError(f"a worker of the daemon has ended ({reason})"))

    def _give_up(self, error: Exception) -> None:
        """Answer all jobs that there are and that come until the end, without doing them."""
        self._skip.set()
        self._try(self._stages.settle)
        for batch, scratch in [*self._begun, *self._out_of_order, *self._continued]:
            self._try(partial(self._stages.fail, batch, scratch, error))
        for job in self._taken:
            self._try(partial(self._stages.refuse, job))
        for item in self._until_end():
            if isinstance(item, _Call):
                self._try(item.action)
            else:
                self._try(partial(self._stages.refuse, item))

    def _try(self, action: Callable[[], None]) -> None:
        """Run one of several independent actions; log an error instead of raising it."""
        try:
            action()
        except BaseException:
            log.exception("a pipeline that has ended cannot answer")

    def _work(self) -> None:
        while True:
            item = self._next()
            if item is None:
                break
            if isinstance(item, _Call):
                if item.when_finished:
                    self._finish_all()
                if self._stopped.is_set():  # the device may still use what the call undoes
                    self._pending.appendleft(item)
                else:
                    item.action()
                continue
            self._taken = [item]
            source = self._open_source()
            if source is None:
                self._stages.refuse(item)
            else:
                self._begin(self._batch(self._taken), source)
            self._taken = []
        if self._stopped.is_set():
            self._make_waiting_calls()
        else:
            self._finish_all()

    def _make_waiting_calls(self) -> None:
        """Make the waiting calls, once the device has done the work that it was given."""
        if self._scratch_source is not None:
            self._stages.settle()
        for item in self._until_end():
            if isinstance(item, _Call):
                item.action()

    def _next(self) -> Job | _Call | None:
        """Take out the next item that may be handled; advance the batches in flight until then."""
        while True:
            if self._stopped.is_set():
                return None
            has_moved = self._poll()
            self._take_items()
            place = self._place_of_next()
            if place is not None:
                item = self._pending[place]
                del self._pending[place]
                return item
            if not has_moved:
                self._wait()

    def _place_of_next(self) -> int | None:
        """Return the place of the next item that may be handled; None if none may.

        Only a job that waits for scratch is overtaken, by a job that needs none of that kind.
        """
        if not self._pending:
            return None
        first, source = self._pending[0], self._open_source()
        if first is None or isinstance(first, _Call) or source is None:
            return 0
        if not self._stages.is_due(first):
            return None
        return 0 if source.has_for(first) else source.find_overtaking_job(self._due_behind_first())

    def _due_behind_first(self) -> Iterator[tuple[int, Job]]:
        """Yield the jobs that may overtake the first one, with their places."""
        for place, item in enumerate(islice(self._pending, 1, MAX_OVERTAKEN + 1), 1):
            if item is None or isinstance(item, _Call) or not self._stages.is_due(item):
                return
            yield place, item

    def _open_source(self) -> ScratchSource[Job, Scratch] | None:
        """Return the source of scratch; None if jobs are refused."""
        return None if self._skip.is_set() else self._scratch_source

    def _take_items(self) -> None:
        self._pending.extend(self._items.take())

    def _until_end(self) -> Iterator[Job | _Call]:
        """Yield all items that wait and that come until the end."""
        while True:
            self._take_items()
            while self._pending:
                item = self._pending.popleft()
                if item is None:
                    return
                yield item
            self._items.wait()

    def _wait(self) -> None:
        """Sleep until it is time to poll again, or there is something to do."""
        if self._pending:
            time.sleep(self._pause)
        elif self._begun or self._out_of_order or self._continued:
            self._items.wait(self._pause)
        else:
            self._items.wait()
        self._poll_later()

    def _poll_later(self) -> None:
        self._idle_polls += 1
        longest = MAX_POLL_SECONDS if self._idle_polls < IDLE_POLLS else IDLE_POLL_SECONDS
        self._pause = min(2 * self._pause, longest)

    def _poll_soon(self) -> None:
        self._idle_polls, self._pause = 0, MIN_POLL_SECONDS

    def _batch(self, batch: list[Job]) -> list[Job]:
        """Add to the batch the next jobs that may be done with it; return the batch."""
        if self._alone:
            self._alone -= 1
            return batch
        while self._pending:
            following = self._pending[0]
            if following is None or isinstance(following, _Call):
                break
            if not (self._stages.is_due(following) and self._stages.fits(batch, following)):
                break
            batch.append(following)
            self._pending.popleft()
        return batch

    def _begin(self, batch: list[Job], source: ScratchSource[Job, Scratch]) -> None:
        scratch = source.take(batch)
        self._poll_soon()
        try:
            self._stages.begin(batch, scratch)
        except Exception as error:
            log.exception("a batch of %d jobs could not be begun", len(batch))
            self._stages.settle()
            source.give_back(scratch)
            if len(batch) == 1:
                self._stages.fail(batch, scratch, error)
            else:
                self._pending.extendleft(reversed(batch))
                self._alone = len(batch)
        else:
            begun = (
                self._out_of_order if self._stages.may_finish_out_of_order(scratch) else self._begun
            )
            begun.append((batch, scratch))

    def _poll(self) -> bool:
        """Advance all batches whose work the device has done; return whether there were any."""
        # The later stage first, because its scratch becomes free then.
        has_moved = self._poll_stage(self._continued)
        has_moved = self._poll_stage(self._begun) or has_moved
        has_moved = self._poll_stage(self._out_of_order) or has_moved
        if not self._continued:
            self.heartbeat.rest()
        elif has_moved or self.heartbeat.is_resting:
            self.heartbeat.work()
        return has_moved

    def _poll_stage(self, stage: deque[tuple[list[Job], Scratch]]) -> bool:
        has_moved = False
        while stage and self._advance(*stage[0]):
            stage.popleft()
            has_moved = True
        if has_moved:
            self._poll_soon()
        return has_moved

    def _advance(self, batch: list[Job], scratch: Scratch) -> bool:
        """Advance a batch if the device is ready; return whether its state has changed."""
        try:
            if not self._stages.is_done(batch, scratch):
                return False
            is_over = self._stages.advance(batch, scratch)
        except Exception as error:
            log.exception("a batch of %d jobs could not be finished", len(batch))
            self._stages.settle()
            self._stages.fail(batch, scratch, error)
            is_over = True
        if is_over:
            assert self._scratch_source is not None, "scratch came from somewhere"
            self._scratch_source.give_back(scratch)
        else:
            self._continued.append((batch, scratch))
        return True

    def _finish_all(self) -> None:
        while (self._begun or self._out_of_order or self._continued) and not self._stopped.is_set():
            if not self._poll():
                time.sleep(self._pause)
                self._poll_later()
