"""Jobs that a device works on in order, several at once: begun one after another, finished so.

What stays true: every job that was put in is either finished or refused, exactly once, in its
order; no more jobs are under way than there is scratch for; and the thread waits for a device
only inside `finish`, so that jobs which are waiting are begun before any wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

__all__ = ["Pipeline", "Stages"]

log = logging.getLogger(__name__)

Job = TypeVar("Job")
Scratch = TypeVar("Scratch")
Job_contra = TypeVar("Job_contra", contravariant=True)
Scratch_contra = TypeVar("Scratch_contra", contravariant=True)


class Stages(Protocol[Job_contra, Scratch_contra]):
    """What is done with a job. `begin` and `finish` may raise; then `fail` follows."""

    def begin(self, job: Job_contra, scratch: Scratch_contra) -> None:
        """Put the job's work on the device, without waiting for it."""

    def finish(self, job: Job_contra, scratch: Scratch_contra) -> bool:
        """Wait for the work and answer the job; False to keep the scratch for later `give_back`."""

    def fail(self, job: Job_contra, error: Exception) -> None:
        """Answer a job that came to nothing. The device must not use its scratch any more."""

    def refuse(self, job: Job_contra) -> None:
        """Answer a job that was never begun."""


class Pipeline(Generic[Job, Scratch]):
    """One thread that runs jobs through `stages`, at most as many at once as `scratch` has items.

    Besides jobs it takes calls (`run`), made between jobs when none is under way.
    """

    def __init__(self, name: str, stages: Stages[Job, Scratch]) -> None:
        self._stages = stages
        self._items: SimpleQueue[Job | Callable[[], None] | None] = SimpleQueue()
        self._free: SimpleQueue[Scratch] = SimpleQueue()
        self._under_way: deque[tuple[Job, Scratch]] = deque()
        self._scratch_items = 0
        self._skip = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    # --- from any thread --------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """Queue a job."""
        self._items.put(job)

    def run(self, action: Callable[[], None]) -> None:
        """Queue a call, made once all jobs before it are finished. It must not raise."""
        self._items.put(action)

    def give_back(self, scratch: Scratch) -> None:
        """Return scratch that `finish` had kept."""
        self._free.put(scratch)

    def end(self) -> None:
        """Refuse the jobs that wait, finish those under way, make the calls, then end."""
        self._skip.set()
        self._items.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the thread; False where it still runs after `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- from the pipeline's own thread, in a call ------------------------------------------

    def provide(self, scratch: Iterable[Scratch]) -> None:
        """Add scratch. A job that comes before there is any is refused."""
        for item in scratch:
            self._scratch_items += 1
            self._free.put(item)

    def withdraw(self) -> list[Scratch]:
        """Take all scratch out, waiting for what is still kept by others."""
        items = [self._free.get() for _ in range(self._scratch_items)]
        self._scratch_items = 0
        return items

    # --- the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._next()) is not None:
            if callable(item):
                self._finish_all()
                item()
            elif self._skip.is_set() or not self._scratch_items:
                self._stages.refuse(item)
            else:
                self._begin(item)
        self._finish_all()

    def _next(self) -> Job | Callable[[], None] | None:
        """Return the next item, having finished jobs while there is none or no scratch for it."""
        while self._under_way and (self._items.empty() or self._free.empty()):
            self._finish_oldest()
        return self._items.get()

    def _begin(self, job: Job) -> None:
        scratch = self._free.get()
        try:
            self._stages.begin(job, scratch)
        except Exception as error:
            log.exception("a job could not be begun")
            self._stages.fail(job, error)
            self._free.put(scratch)
        else:
            self._under_way.append((job, scratch))

    def _finish_oldest(self) -> None:
        job, scratch = self._under_way.popleft()
        try:
            is_free = self._stages.finish(job, scratch)
        except Exception as error:
            log.exception("a job could not be finished")
            self._stages.fail(job, error)
            is_free = True
        if is_free:
            self._free.put(scratch)

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish_oldest()
