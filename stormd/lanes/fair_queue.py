"""Hands the jobs of many sessions to a lane's workers, so that each moves as many bytes.

A session's jobs start in the order they came. A session with one job waiting is served before
another's next one, however many and large that has. A retired session comes out exactly once more,
with no job, when nothing of it waits or runs any longer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

__all__ = ["FairQueue", "FairShares"]

JOB_BYTES: Final = 64 << 10
"""What a job costs beside its bytes, in bytes: some 20 microseconds of a worker. Else a session
with small tensors would have most of the time."""

Job = TypeVar("Job")


class FairShares:
    """Says who moves bytes next. Sessions are numbers, each known from `enter` until `forget`.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): a session's tag is what it has moved, and
    whoever has the smallest goes next. One that has had nothing to do begins again where whoever
    went last began, so it is served soon and makes up for nothing.
    """

    def __init__(self) -> None:
        self._tags: dict[int, int] = {}
        self._now = 0
        """The tag of the session that went last, when it did."""

    def enter(self, session: int) -> None:
        """Note that a session which had none has work."""
        self._tags[session] = max(self._tags.get(session, 0), self._now)

    def next(self, sessions: Iterable[int]) -> int:
        """Return which of them goes next: of like ones the first."""
        return min(sessions, key=self._tags.__getitem__)

    def moves(self, session: int, nbytes: int) -> None:
        """Note that a session goes, with so many bytes."""
        self._now = max(self._now, self._tags[session])
        self._tags[session] += nbytes

    def forget(self, session: int) -> None:
        """Forget a session that has ended; one that never came is fine."""
        self._tags.pop(session, None)

    def __len__(self) -> int:
        return len(self._tags)


class FairQueue(Generic[Job]):
    """Thread-safe. Sessions are numbers; they appear with their first job."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # protects all below
        self._waiting: dict[int, deque[tuple[Job, int]]] = {}  # with their bytes
        self._shares = FairShares()
        self._running: dict[int, int] = {}
        self._idle = 0  # workers that wait for a job
        self._retiring: set[int] = set()
        self._retired: deque[int] = deque()
        self._closed = False

    def put(self, session: int, jobs: Sequence[tuple[Job, int]]) -> None:
        """Add jobs with the bytes of each. The session has not been retired."""
        with self._changed:
            queue = self._waiting.get(session)
            if queue is None:
                queue = self._waiting[session] = deque()
                self._shares.enter(session)
            queue.extend(jobs)
            if self._idle:
                self._changed.notify(len(jobs))

    def take(self) -> tuple[int, Job | None] | None:
        """Wait for a job and return it with its session; `done` must follow.

        The job is None where the session was retired and is finished; then no `done` follows.
        Returns None once the queue is closed and empty.
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
        """Return a job that waits with its session, as `take`; None where none does."""
        with self._changed:
            return self._next() if self._waiting else None

    def is_idle(self, session: int) -> bool:
        """Tell whether nothing of the session waits or runs, and nothing will until `put`."""
        with self._changed:
            return session not in self._waiting and session not in self._running

    def done(self, session: int, count: int = 1) -> None:
        """Note that so many jobs that were taken have ended and their results were posted."""
        with self._changed:
            self._running[session] -= count
            if not self._running[session]:
                del self._running[session]
                self._retire_if_idle(session)

    def remove(self, session: int) -> list[Job]:
        """Take the session's waiting jobs out and return them; those taken go on."""
        with self._changed:
            return [job for job, _ in self._waiting.pop(session, ())]

    def retire(self, session: int) -> None:
        """Have the session come out of `take` once more when nothing of it waits or runs."""
        with self._changed:
            self._retiring.add(session)
            self._retire_if_idle(session)

    def close(self) -> None:
        """Let `take` return None to every worker once nothing waits. Twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- called with the lock held ----------------------------------------------------------

    def _next(self) -> tuple[int, Job]:
        session = self._shares.next(self._waiting)
        queue = self._waiting[session]
        job, nbytes = queue.popleft()
        self._shares.moves(session, nbytes + JOB_BYTES)
        if not queue:
            del self._waiting[session]
        self._running[session] = self._running.get(session, 0) + 1
        return session, job

    def _retire_if_idle(self, session: int) -> None:
        if session not in self._retiring or session in self._waiting or session in self._running:
            return
        self._retiring.discard(session)
        self._shares.forget(session)
        self._retired.append(session)
        self._changed.notify()
