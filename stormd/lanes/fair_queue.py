"""Hands the jobs of many sessions to a lane's workers, each session in turn.

A session's jobs start in the order they came. A session with one job waiting is served within one
round, however many another has. A retired session comes out exactly once more, with no job, when
nothing of it waits or runs any longer.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """Thread-safe. Sessions are numbers; they appear with their first job."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # protects all below
        self._waiting: dict[int, deque[Job]] = {}
        self._turns: deque[int] = deque()  # sessions with jobs waiting, next one first
        self._running: dict[int, int] = {}
        self._retiring: set[int] = set()
        self._retired: deque[int] = deque()
        self._closed = False

    def put(self, session: int, job: Job) -> None:
        """Add a job. The session has not been retired."""
        with self._changed:
            queue = self._waiting.get(session)
            if queue is None:
                queue = self._waiting[session] = deque()
                self._turns.append(session)
            queue.append(job)
            self._changed.notify()

    def take(self) -> tuple[int, Job | None] | None:
        """Wait for a job and return it with its session; `done` must follow.

        The job is None where the session was retired and is finished; then no `done` follows.
        Returns None once the queue is closed and empty.
        """
        with self._changed:
            while not self._turns and not self._retired:
                if self._closed:
                    return None
                self._changed.wait()
            if self._retired:
                return self._retired.popleft(), None
            return self._next()

    def done(self, session: int) -> None:
        """Note that a job that was taken has ended and its result was posted."""
        with self._changed:
            self._running[session] -= 1
            if not self._running[session]:
                del self._running[session]
                self._retire_if_idle(session)

    def remove(self, session: int) -> list[Job]:
        """Take the session's waiting jobs out and return them; those taken go on."""
        with self._changed:
            if session not in self._waiting:
                return []
            self._turns.remove(session)
            return list(self._waiting.pop(session))

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
        session = self._turns.popleft()
        queue = self._waiting[session]
        job = queue.popleft()
        if queue:
            self._turns.append(session)
        else:
            del self._waiting[session]
        self._running[session] = self._running.get(session, 0) + 1
        return session, job

    def _retire_if_idle(self, session: int) -> None:
        if session not in self._retiring or session in self._waiting or session in self._running:
            return
        self._retiring.discard(session)
        self._retired.append(session)
        self._changed.notify()
