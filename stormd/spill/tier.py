"""The threads of the tier: they write and read what the ledger orders, reads before writes.

Each job gets exactly one answer, whatever happens. After the first fault the threads write and read
nothing more, and waiting jobs are answered as failed. Only its own thread waits for an operation
that the kernel has begun. A thread uses a block until its answer, and no longer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from stormd.errors import SpillUnavailable
from stormd.ledger.events import SpillDone, SpillFailed, SpillJob
from stormd.monitoring.health import Heartbeat
from stormd.sizes import format_size
from stormd.spill.file import SpillFile
from stormd.spill.records import WORKER_BYTES, BlobMover, Damaged
from stormd.spill.sealing import Sealer

__all__ = ["SLOW_SECONDS", "SpillTier"]

log = logging.getLogger(__name__)

SLOW_SECONDS: Final = 10.0
"""Maximum time for one record; beyond it the disk counts as failed, since trainers wait for it."""

Post = Callable[[*tuple[SpillDone | SpillFailed, ...]], None]


class SpillTier:
    """Moves blobs between the pool at `pool_address` and `file` with `threads` workers.

    Any worker may call `post` with an answer. `close` must follow.

    Raises:
        SpillUnavailable: the memory or the threads for so many workers cannot be had.
    """

    def __init__(
        self,
        *,
        file: SpillFile,
        sealer: Sealer,
        pool_address: int,
        post: Post,
        threads: int,
    ) -> None:
        self._file = file
        self._post = post
        self._changed = threading.Condition()  # protects the four below
        self._reads: deque[SpillJob] = deque()
        self._writes: deque[SpillJob] = deque()
        self._fault = ""
        self._closed = False
        self._heartbeats = [Heartbeat(f"stormd-spill-{number}") for number in range(threads)]
        self._workers: list[threading.Thread] = []
        try:
            for heartbeat in self._heartbeats:
                self._start_worker(heartbeat, BlobMover(pool_address, file, sealer))
        except (OSError, MemoryError, RuntimeError) as error:
            self.close(SLOW_SECONDS)
            raise SpillUnavailable(
                f"only {len(self._workers)} of {threads} threads of the tier on disk can be "
                f"started, which take {format_size(WORKER_BYTES)} each ({error}): lower "
                "spill_threads, or raise the limit of processes (ulimit -u) or of address space "
                "(ulimit -v)"
            ) from error

    def _start_worker(self, heartbeat: Heartbeat, mover: BlobMover) -> None:
        worker = threading.Thread(
            target=self._work, args=(heartbeat, mover), name=heartbeat.name, daemon=True
        )
        try:
            worker.start()
        except BaseException:
            mover.close()
            raise
        self._workers.append(worker)

    # --- for the event loop -----------------------------------------------------------------

    def begin(self, jobs: Sequence[SpillJob]) -> None:
        """Queue jobs; each is answered by SpillDone or SpillFailed."""
        with self._changed:
            for job in jobs:
                (self._reads if job.is_read else self._writes).append(job)
            self._changed.notify(len(jobs))

    def fault(self) -> str:
        """Return why the tier has failed, empty while it works; does not wait for a thread."""
        if not self._fault:
            for heartbeat in self._heartbeats:
                trouble = heartbeat.trouble(SLOW_SECONDS)
                if trouble:
                    self._end(trouble)
        return self._fault

    def close(self, seconds: float) -> bool:
        """End the threads; False if one still runs after `seconds`, and the file stays open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        if any(worker.is_alive() for worker in self._workers):
            return False
        self._file.close()
        return True

    # --- run by the workers -----------------------------------------------------------------

    def _work(self, heartbeat: Heartbeat, mover: BlobMover) -> None:
        try:
            while (job := self._take()) is not None:
                with heartbeat:
                    answer = self._perform(heartbeat, mover, job)
                self._post(answer)
        finally:
            mover.close()

    def _take(self) -> SpillJob | None:
        """Wait for a job; return None once the tier is closed and no job waits."""
        with self._changed:
            while not self._reads and not self._writes:
                if self._closed:
                    return None
                self._changed.wait()
            return self._reads.popleft() if self._reads else self._writes.popleft()

    def _perform(
        self, heartbeat: Heartbeat, mover: BlobMover, job: SpillJob
    ) -> SpillDone | SpillFailed:
        if self._fault:
            return SpillFailed(session=job.session, entry=job.entry, detail=self._fault)
        try:
            for _ in _steps(mover, job):
                heartbeat.work()  # after each record, since only one record may take long
        except (OSError, Damaged) as error:
            return self._failed(job, str(getattr(error, "strerror", "") or error))
        except Exception as error:  # whatever it is, the job must be answered
            log.exception("a job of the tier on disk failed")
            return self._failed(job, f"{type(error).__name__}: {error}")
        return SpillDone(session=job.session, entry=job.entry)

    def _failed(self, job: SpillJob, reason: str) -> SpillFailed:
        doing = "read" if job.is_read else "write"
        self._end(f"a {doing} of {format_size(job.block.nbytes)} failed: {reason}"[:500])
        return SpillFailed(session=job.session, entry=job.entry, detail=self._fault)

    def _end(self, reason: str) -> None:
        with self._changed:
            self._fault = self._fault or reason


def _steps(mover: BlobMover, job: SpillJob) -> Iterator[None]:
    name = (job.session, job.entry, job.generation)
    if job.is_read:
        return mover.read(name, job.extent, job.block)
    return mover.write(name, job.block, job.extent)
