"""Shares a lane's workers among many sessions so that each session moves equally many bytes.

A session's jobs start in the order in which they were put. A session with one waiting job is served
before the next job of another session, however many and large that session's jobs are. `take`
returns a retired session exactly once more, without a job, when none of its jobs waits or runs any
longer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

__all__ = ["FairQueue"]

JOB_BYTES: Final = 64 << 10
"""Cost of a job beyond its bytes, expressed in bytes: some 20 microseconds of a worker. Without it,
a session with small tensors would get most of the time."""

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """The jobs of all sessions. Thread-safe. A session is a number, known from its first job on.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): a session's tag is the number of bytes
    that it has moved, and the session with the smallest tag is next. A session that had no work
    restarts with the tag that the last served session had, so it is served soon but gets no credit
    for the idle time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # protects all below
        self._waiting: dict[int, deque[tuple[Job, int]]] = {}  # jobs with their bytes
        self._tags: dict[int, int] = {}  # of each session until it retires
        self._now = 0  # the tag that the last served session had when it was served
        self._running: dict[int, int] = {}
        self._idle = 0  # workers that wait for a job
        self._retiring: set[int] = set()
        self._retired: deque[int] = deque()
        self._closed = False

    def put(self, session: int, jobs: Sequence[tuple[Job, int]]) -> None:
        """Add jobs, each with its bytes. The session must not be retired."""
        with self._changed:
            queue = self._waiting.get(session)
            if queue is None:
                queue = self._waiting[session] = deque()
                self._tags[session] = max(self._tags.get(session, 0), self._now)
            queue.extend(jobs)
            if self._idle:
                self._changed.notify(len(jobs))

    def take(self) -> tuple[int, Job | None] | None:
        """Wait for a job and return it with its session; `done` must follow.

        The job is None if the session was retired and is finished; then no `done` follows. Returns
        None once the queue is closed and empty.
        """
        with self._changed:
            while not self._waiting and not self._retired:
                if self._closed:
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            if self._retired:
                return self._retired.popleft(), None
            return self._next()

    def take_now(self) -> tuple[int, Job] | None:
        """Return a waiting job with its session, like `take`; None if no job waits."""
        with self._changed:
            return self._next() if self._waiting else None

    def is_idle(self, session: int) -> bool:
        """Return whether no job of the session waits or runs, nor will before the next `put`."""
        with self._changed:
            return session not in self._waiting and session not in self._running

    def done(self, session: int, count: int = 1) -> None:
        """Note that so many taken jobs have ended and that their results were posted."""
        with self._changed:
            self._running[session] -= count
            if not self._running[session]:
                del self._running[session]
                self._retire_if_idle(session)

    def remove(self, session: int) -> list[Job]:
        """Remove the session's waiting jobs and return them; jobs already taken continue."""
        with self._changed:
            return [job for job, _ in self._waiting.pop(session, ())]

    def retire(self, session: int) -> None:
        """Have `take` return the session once more when none of its jobs waits or runs."""
        with self._changed:
            self._retiring.add(session)
            self._retire_if_idle(session)

    def close(self) -> None:
        """Have `take` return None to every worker once no job waits. Calling it twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- called with the lock held ----------------------------------------------------------

    def _next(self) -> tuple[int, Job]:
        session = min(self._waiting, key=self._tags.__getitem__)  # of equal tags the first
        queue = self._waiting[session]
        job, nbytes = queue.popleft()
        self._now = max(self._now, self._tags[session])
        self._tags[session] += nbytes + JOB_BYTES
        if not queue:
            del self._waiting[session]
        self._running[session] = self._running.get(session, 0) + 1
        return session, job

    def _retire_if_idle(self, session: int) -> None:
        if session not in self._retiring or session in self._waiting or session in self._running:
            return
        self._retiring.discard(session)
        self._tags.pop(session, None)
        self._retired.append(session)
        self._changed.notify()
