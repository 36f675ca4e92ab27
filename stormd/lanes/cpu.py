"""The cpu lane: one shared staging area per session, and worker threads that encode and decode.

Workers touch a session's memory only between its attachment and its `Detached`. Each job is
answered once, also when it fails or is skipped. The event loop only queues jobs, except for those
that are so small that passing them to a worker and back would take the loop longer.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from storm_kernels.errors import CorruptBlob

from stormd.errors import LaneUnavailable, error_with_remedy
from stormd.lanes import SEE_LOG, Attachment, Lane, Post, Speeds
from stormd.lanes.fair_queue import FairQueue
from stormd.lanes.host_codec import HostCodec
from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import Detached, RestoreDone, RestoreJob, Result, StoreDone, StoreJob
from stormd.memory.host_pool import HostPool
from stormd.memory.shared_memory import SharedMemory
from stormd.monitoring.health import Heartbeat
from stormd.monitoring.link_meter import LinkLimit
from stormd.open_files import close_all
from stormd.protocol import Hello
from stormd.protocol.timeline import PAGE_BYTES, STORED, Timelines, restored_slot
from stormd.sizes import format_size

__all__ = ["CpuLane"]

log = logging.getLogger(__name__)

MIN_STAGING: Final = 64 << 10
"""Bytes of the smallest staging area, whatever a client asks for."""

STAGING_SEGMENT: Final = 0

START_SECONDS: Final = 5.0
"""How long to wait for the started workers to end when not all can be started."""

AT_ONCE_BYTES: Final = 64 << 10
"""Most bytes of jobs that the event loop does itself if their session has no others. They take some
20 microseconds; waking a worker and then the loop takes several times that."""

LARGE_BYTES: Final = 1 << 20
"""Least bytes of a job whose result is posted at once: waking the loop costs little compared with
it."""

HELD_RESULTS: Final = 32
HELD_SECONDS: Final = 0.0005
"""A worker posts the results of small jobs together while other jobs wait. It holds at most
HELD_RESULTS, and from the first one on for no longer than HELD_SECONDS plus the job in flight."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory that a session and its lane share."""

    page: SharedMemory
    staging: SharedMemory
    timelines: Timelines
    """The counters of the page."""

    def free(self) -> None:
        """Give the staging area's pages back to the machine, even while the client maps them.

        A client that copied out of the area afterwards would read zeros. So the page is poisoned
        first, which says that the area no longer holds what was restored. The page lives as long as
        the client maps it.
        """
        self.timelines.poison(STORED)
        self.staging.discard()
        self.page.close()
        self.staging.close()


@dataclass(slots=True)
class _Held:
    """The results that a worker has not posted yet, and the job that has no result yet."""

    results: list[Result] = field(default_factory=list)
    since: float = 0.0
    job: StoreJob | RestoreJob | None = None

    def add(self, result: Result) -> None:
        if not self.results:
            self.since = time.perf_counter()
        self.results.append(result)
        self.job = None

    def is_due(self) -> bool:
        waited = time.perf_counter() - self.since
        return len(self.results) >= HELD_RESULTS or waited >= HELD_SECONDS


class CpuLane(Lane):
    """Serves sessions with `threads` workers; any of them may call `post` with results.

    `staging_bytes` and `chunk_bytes` are the most that one session is granted, `all_staging_bytes`
    the most that all sessions have together. The event loop itself does jobs of up to
    `at_once_bytes`. `close` must follow.

    Raises:
        LaneUnavailable: there is not enough memory, or not enough threads, for the workers.
    """

    device = "cpu"

    def __init__(
        self,
        *,
        pool: HostPool,
        post: Post,
        staging_bytes: int,
        all_staging_bytes: int,
        chunk_bytes: int,
        threads: int,
        at_once_bytes: int = AT_ONCE_BYTES,
    ) -> None:
        super().__init__(post)
        self._limit = LinkLimit()
        self._staging_bytes = staging_bytes
        self._all_staging_bytes = all_staging_bytes
        self._chunk_bytes = chunk_bytes
        # Written by the loop in attach and by a worker in _let_go, read by workers in between.
        self._memories: dict[int, _Memory] = {}
        self._queue: FairQueue[StoreJob | RestoreJob] = FairQueue()
        self._heartbeats = tuple(Heartbeat(f"stormd-cpu-{number}") for number in range(threads))
        self._at_once_bytes = at_once_bytes
        *codecs, self._own_codec = _codecs(pool, [chunk_bytes] * threads + [at_once_bytes])
        self._lock = threading.Lock()  # protects the number of workers alive
        self._working = threads
        self._workers = [
            threading.Thread(target=self._work, args=pair, name=pair[0].name, daemon=True)
            for pair in zip(self._heartbeats, codecs, strict=True)
        ]
        self._start_workers(codecs)

    def _start_workers(self, codecs: list[HostCodec]) -> None:
        for number, worker in enumerate(self._workers):
            try:
                worker.start()
            except RuntimeError as error:
                del self._workers[number:]
                self.close(START_SECONDS)
                for codec in codecs[number:]:
                    codec.close()
                raise LaneUnavailable(
                    f"only {number} of {len(codecs)} threads of the cpu lane can be started "
                    f"({error}): lower encode_threads, or raise the limit of processes (ulimit -u) "
                    "or of address space (ulimit -v)"
                ) from error

    # --- called on the event loop -----------------------------------------------------------

    @property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        return self._heartbeats

    def speeds(self, session: int) -> Speeds:  # noqa: ARG002 - one link for all
        """Return only the limit: the time of copies in memory depends on what else runs."""
        return Speeds(limit=self._limit.bytes_per_second)

    def limit_link(self, bytes_per_second: int) -> None:
        self._limit.change(bytes_per_second)

    def attach(self, session: int, hello: Hello, descriptors: Sequence[int] = ()) -> Attachment:
        """Make the timeline page and the staging area, of the requested size or less."""
        staging = hello.staging_bytes
        if not descriptors:
            staging = _granted(staging, self._staging_bytes)
        given = list(descriptors) or [-1, -1]
        try:
            if not self._working:
                raise LaneUnavailable("the cpu lane's workers have ended: restart the daemon")
            self._check_staging(staging)
            memory = _shared(session, staging, given)
        except OSError as error:
            raise LaneUnavailable(
                f"no shared memory of {format_size(staging)} for a session: "
                f"{error_with_remedy(error, SEE_LOG)}"
            ) from error
        finally:
            close_all(given)
        self._memories[session] = memory
        made = memory.page.take_descriptor(), memory.staging.take_descriptor()
        if descriptors:  # the client has them
            close_all(made)
        return Attachment(
            descriptors=() if descriptors else made,
            staging_bytes=staging,
            chunk_bytes=min(self._chunk_bytes, staging // 2),
            segment_bytes=staging,
        )

    def _check_staging(self, wanted: int) -> None:
        """Check the limit on all staging areas together: their pages are not the pool's.

        Raises:
            LaneUnavailable: the sessions that are attached or still being detached use too much.
        """
        live = [memory.staging.nbytes for memory in list(self._memories.values())]
        if sum(live) + wanted > self._all_staging_bytes:
            raise LaneUnavailable(
                f"{len(live)} sessions share {format_size(sum(live))} with the daemon, and "
                f"{format_size(wanted)} more would be above {format_size(self._all_staging_bytes)}"
                ": end one, or raise all_staging_bytes_cpu or lower staging_bytes_cpu"
            )

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> Sequence[Result]:
        """Queue jobs, or do small ones at once if the session has no others."""
        sized = [(job, job.nbytes) for job in jobs]
        if sum([nbytes for _, nbytes in sized]) <= self._at_once_bytes and self._may_do_at_once(
            session
        ):
            return [self._perform(self._own_codec, job) for job in jobs]
        self._queue.put(session, sized)
        return ()

    def _may_do_at_once(self, session: int) -> bool:
        """Return whether a worker lives, the session has no jobs, and the link has no limit."""
        is_free = bool(self._working) and not self._limit.bytes_per_second
        return is_free and self._queue.is_idle(session)

    def detach(self, session: int) -> None:
        skipped = self._queue.remove(session)
        detail = "the session ended before it was done"
        self._post(*(job.failed("ActivationLost", detail) for job in skipped))
        self._queue.retire(session)

    def close(self, seconds: float) -> bool:
        self._queue.close()
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self._own_codec.close()
        return not any(worker.is_alive() for worker in self._workers)

    # --- run by the workers -----------------------------------------------------------------

    def _work(self, heartbeat: Heartbeat, codec: HostCodec) -> None:
        held = _Held()
        try:
            self._take_tasks(heartbeat, codec, held)
        except BaseException as error:
            log.exception("a worker has ended")
            heartbeat.ended(f"{type(error).__name__}: {error}")
            self._give_up(held, f"a worker of the daemon has ended ({type(error).__name__})")
        finally:
            codec.close()

    def _take_tasks(self, heartbeat: Heartbeat, codec: HostCodec, held: _Held) -> None:
        while True:
            task: tuple[int, StoreJob | RestoreJob | None] | None = None
            if held.results:
                task = self._queue.take_now()
            if task is None:
                self._post_held(held)
                task = self._queue.take()
            if task is None:
                break
            with heartbeat:
                self._do(codec, held, *task)

    def _do(
        self, codec: HostCodec, held: _Held, session: int, job: StoreJob | RestoreJob | None
    ) -> None:
        if job is None:
            self._free(session)
            return
        held.job = job
        held.add(self._perform(codec, job))
        if job.nbytes >= LARGE_BYTES or held.is_due():
            self._post_held(held)

    def _give_up(self, held: _Held, detail: str) -> None:
        """Answer this worker's unfinished job; the last worker answers all jobs that follow."""
        if held.job is not None:
            held.add(held.job.failed("ActivationLost", detail))
        self._post_held(held)
        with self._lock:
            self._working -= 1
            is_last = not self._working
        while is_last and (task := self._queue.take()) is not None:
            session, waiting = task
            if waiting is None:
                self._free(session)
            else:
                held.add(waiting.failed("ActivationLost", detail))
                self._post_held(held)

    def _post_held(self, held: _Held) -> None:
        """Post the results; only then mark their sessions' jobs as done."""
        results, held.results = held.results, []
        if results:
            self._post(*results)
        for session, count in Counter([one.session for one in results]).items():
            self._queue.done(session, count)

    def _perform(self, codec: HostCodec, job: StoreJob | RestoreJob) -> Result:
        try:
            if isinstance(job, StoreJob):
                return self._store(codec, job)
            return self._restore(codec, job)
        except CorruptBlob as error:
            log.error("a blob of session %016x is damaged: %s", job.session, error)  # noqa: TRY400 - no fault of the code that ran
            return job.failed("CorruptBlob", str(error))
        except Exception as error:  # whatever it is, the client must be told
            log.exception("a job of session %016x failed", job.session)
            return job.failed("ActivationLost", f"{type(error).__name__}: {error}")

    def _store(self, codec: HostCodec, job: StoreJob) -> Result:
        began = time.perf_counter()
        block, mode = codec.store(self._address(job), job)
        self._limit.wait("store", block.nbytes)
        return StoreDone(
            session=job.session,
            entry=job.entry,
            block=block,
            mode=mode,
            seconds=time.perf_counter() - began,
        )

    def _restore(self, codec: HostCodec, job: RestoreJob) -> Result:
        began = time.perf_counter()
        codec.restore(job.block, self._address(job), job.nbytes)
        self._limit.wait("restore", job.block.nbytes)
        self._memories[job.session].timelines.store(restored_slot(job.ticket), job.ticket)
        return RestoreDone(
            session=job.session, ticket=job.ticket, seconds=time.perf_counter() - began
        )

    def _address(self, job: StoreJob | RestoreJob) -> int:
        staging = self._memories[job.session].staging
        if job.segment != STAGING_SEGMENT or job.offset + job.nbytes > staging.nbytes:
            raise ValueError(
                f"bytes {job.offset} to {job.offset + job.nbytes} of segment {job.segment} are not "
                f"in the staging area of {staging.nbytes}"
            )
        return staging.address + job.offset

    def _free(self, session: int) -> None:
        self._memories.pop(session).free()
        self._post(Detached(session))


def _codecs(pool: HostPool, chunk_bytes: list[int]) -> list[HostCodec]:
    """Return one codec with scratch per worker and for the loop: none could work without one.

    Raises:
        LaneUnavailable: there is not enough memory.
    """
    codecs: list[HostCodec] = []
    try:
        for most in chunk_bytes:
            codecs.append(HostCodec(pool, most))  # noqa: PERF401 - what is made is closed
    except (OSError, MemoryError) as error:
        for codec in codecs:
            codec.close()
        raise LaneUnavailable(
            f"no memory for the scratch of {len(chunk_bytes) - 1} workers of the cpu lane, "
            f"{format_size(blob_bound(max(chunk_bytes)))} each: lower encode_threads or "
            "part_bytes_cpu, "
            "free memory, or raise the limit of address space (ulimit -v)"
        ) from error
    return codecs


def _granted(asked: int, most: int) -> int:
    """Return the staging size: whole pages, at most `most`, which is also the default."""
    wanted = min(max(asked, MIN_STAGING), most) if asked else most
    return -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE


def _shared(session: int, staging_bytes: int, given: list[int]) -> _Memory:
    """Return new memory, or the memory of two descriptors; set the used ones to -1 in `given`."""
    if len(given) != 2:
        raise OSError(errno.EINVAL, f"expected 2 descriptors, got {len(given)}")
    page_descriptor, given[0] = given[0], -1
    page = SharedMemory(f"stormd-{session:x}-timeline", PAGE_BYTES, page_descriptor)
    try:
        descriptor, given[1] = given[1], -1
        staging = SharedMemory(f"stormd-{session:x}-staging", staging_bytes, descriptor)
        return _Memory(page, staging, Timelines(page.address))
    except OSError:
        page.close()
        raise
