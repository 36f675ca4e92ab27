"""One client on one GPU: its mapped memory, its two streams, and the threads that feed them.

What stays true: the daemon's streams read the client's memory only from where `published` says it
is ready, and say by `stored` that it may be used again; `Restored` is sent only after the decoder
has verified the bytes; and whatever a dead client left behind, no stream waits for it.

Two pipelines, one a direction, so that stores and restores overlap. Each job is put on the
device at once, behind a stream wait for the client's counter; the pipeline's thread then sleeps
until the codec is done with it. Only then is a blob's size known, and its block placed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Final

from storm_kernels.ancf.layout import Mode
from storm_kernels.cuda_driver import (
    IpcMapping,
    RegisteredHost,
    Stream,
    wait_event,
    wait_value,
    write_value,
)
from storm_kernels.errors import CorruptBlob, CudaDriverError, KernelsError

from stormd.arena import Block
from stormd.lanes import (
    Detached,
    RestoreDone,
    RestoreFailed,
    RestoreJob,
    Result,
    SegmentMapped,
    SegmentRefused,
    StoreDone,
    StoreFailed,
    StoreJob,
    blob_bound,
)
from stormd.lanes.cuda_device import CudaDevice, Scratch
from stormd.lanes.pipeline import Pipeline
from stormd.protocol import MapSegment
from stormd.protocol.timeline import PAGE_BYTES, PUBLISHED, RESTORED, STORED, Timelines
from stormd.ranges import span
from stormd.shared_memory import SharedMemory

__all__ = ["CudaSession"]

log = logging.getLogger(__name__)

PARTS_UNDER_WAY: Final = 10
"""Of one session, in each direction. Without MPS the codec runs only between two time slices of
the trainer, milliseconds apart: what is coded in one must keep the link busy until the next."""

POISON_SECONDS: Final = 0.01
"""Between two poisonings of a dead client's counter, until the last wait is released: a write
that the client's device still had under way may undo the first."""

SKIPPED: Final = "the session ended before it was done"
UNWRITTEN: Final = (1 << 64) - 1
"""Status that the codec must overwrite."""


@dataclass(frozen=True, slots=True)
class _Open:
    """What both directions of a session need on the device, from its first segment on."""

    page: RegisteredHost
    store_stream: Stream
    restore_stream: Stream
    scratch: tuple[Scratch, ...]

    def close(self) -> None:
        for scratch in self.scratch:
            scratch.close()
        for owned in (self.store_stream, self.restore_stream, self.page):
            owned.close()


class CudaSession:
    """Serves one session until `detach`; results go to `post`, from several threads.

    The page stays mapped, and the client's memory too, until Detached has been posted.
    """

    def __init__(
        self,
        session: int,
        device: CudaDevice,
        page: SharedMemory,
        *,
        part_bytes: int,
        post: Callable[[Result], None],
    ) -> None:
        self.session = session
        self.device = device
        self.post = post
        self._part_bytes = part_bytes
        self._page = page
        self._timelines = Timelines(page.address)
        # The two below: written by the store thread while no job needs them, read by both.
        self._segments: dict[int, IpcMapping] = {}
        self._open: _Open | None = None
        name = f"{session & 0xFFFFFFFF:x}"
        self.stores: Pipeline[StoreJob, Scratch] = Pipeline(f"stormd-out-{name}", _Stores(self))
        self.restores: Pipeline[RestoreJob, Scratch] = Pipeline(
            f"stormd-back-{name}", _Restores(self)
        )
        self._end = threading.Thread(target=self._let_go, name=f"stormd-end-{name}", daemon=True)
        for pipeline in (self.stores, self.restores):
            pipeline.run(device.context.make_current)

    # --- called on the event loop -----------------------------------------------------------

    def map_segment(self, request: MapSegment) -> None:
        """Map the segment in the store thread; answered by SegmentMapped or SegmentRefused."""
        self.stores.run(partial(self._map, request))

    def unmap_segment(self, segment: int) -> None:
        """Unmap the segment once the jobs that were queued before are done."""
        both = threading.Barrier(2, action=partial(self._unmap, segment))
        for pipeline in (self.stores, self.restores):
            pipeline.run(partial(_meet, both))

    def detach(self) -> None:
        """Release what waits for the client, end both threads, let all go; then Detached."""
        self._timelines.poison(PUBLISHED)
        self.stores.end()
        self.restores.end()
        self._end.start()

    def join(self, seconds: float) -> bool:
        """Wait for the end that `detach` began; False where it is not over after `seconds`."""
        self._end.join(seconds)
        return not self._end.is_alive()

    # --- for the stages ---------------------------------------------------------------------

    @property
    def opened(self) -> _Open:
        """What was made with the first segment, which every job names."""
        assert self._open is not None, "a job came before a segment"
        return self._open

    def address(self, job: StoreJob | RestoreJob) -> int:
        """Return the device address of a job's range."""
        mapping = self._segments[job.segment]
        assert job.offset + job.nbytes <= mapping.nbytes, "a range that the ledger let through"
        return mapping.address + job.offset

    def counter(self, counter: int) -> int:
        """Return the device's address of one of the session's counters."""
        return self.opened.page.device_address + counter

    def note(self, counter: int, value: int) -> None:
        """Raise one of the session's counters from the CPU."""
        self._timelines.store(counter, value)

    # --- run between jobs, in the pipelines' threads ----------------------------------------

    def _map(self, request: MapSegment) -> None:
        try:
            mapping = self._mapped(request)
        except (KernelsError, ValueError) as error:
            detail = f"segment {request.segment} cannot be mapped: {error}"
            log.warning("session %d: %s", self.session, detail)
            self.post(SegmentRefused(self.session, request.segment, detail[:1000]))
            return
        self._segments[request.segment] = mapping
        self.post(SegmentMapped(self.session, request.segment))

    def _mapped(self, request: MapSegment) -> IpcMapping:
        if self._open is None:
            self._open = _opened(self._page, self.device, self._part_bytes)
            self.stores.provide(self._open.scratch[:PARTS_UNDER_WAY])
            self.restores.provide(self._open.scratch[PARTS_UNDER_WAY:])
        mapping = IpcMapping(request.handle)
        if mapping.nbytes < request.nbytes:
            mapping.close()
            raise ValueError(f"the handle leads to {mapping.nbytes} bytes, not {request.nbytes}")
        return mapping

    def _unmap(self, segment: int) -> None:
        try:
            self._segments.pop(segment).close()
        except KernelsError:
            log.exception("segment %d of session %d cannot be unmapped", segment, self.session)

    # --- run by a thread of its own at the end ----------------------------------------------

    def _let_go(self) -> None:
        for pipeline in (self.stores, self.restores):
            while not pipeline.join(POISON_SECONDS):
                self._timelines.poison(PUBLISHED)
        try:
            self.device.context.make_current()
            self._close_all()
        except KernelsError:
            log.exception("session %d could not let all its device memory go", self.session)
        self._page.close()
        self.post(Detached(self.session))

    def _close_all(self) -> None:
        self.stores.withdraw()  # waits until no copy to the pool uses scratch any more
        self.restores.withdraw()
        for mapping in self._segments.values():
            mapping.close()
        if self._open is not None:
            self._open.close()


class _Stores:
    """The stages of a store: encode from the client's memory, then copy down."""

    def __init__(self, session: CudaSession) -> None:
        self._session = session

    def begin(self, job: StoreJob, scratch: Scratch) -> None:
        """Put the encoder on the store stream, behind the client's counter."""
        session, stream = self._session, self._session.opened.store_stream.handle
        scratch.words[0], scratch.words[1] = 0, UNWRITTEN
        wait_value(stream, session.counter(PUBLISHED), job.sequence)
        scratch.code_began.record(stream)
        with span("encode", job.nbytes, job.entry):
            session.device.codec.encode(
                job,
                session.address(job),
                (scratch.blob.address, scratch.blob.nbytes),
                scratch=scratch.work.address,
                result=scratch.result.device_address,
                stream=stream,
            )
        write_value(stream, session.counter(STORED), job.sequence)
        scratch.coded.record(stream)

    def finish(self, job: StoreJob, scratch: Scratch) -> bool:
        """Place the blob once its size is known, and put its copy on the link."""
        session = self._session
        scratch.coded.synchronize()
        block = job.space.place(job.promised, _encoded_bytes(job, scratch))
        try:
            with span("copy down", block.nbytes, job.entry):
                session.device.download(scratch, block)
        except BaseException:
            job.space.unplace(block, job.promised)
            raise
        session.device.when_copied(scratch, partial(self._copied, job, scratch, block))
        return False

    def fail(self, job: StoreJob, error: Exception) -> None:
        """Answer a store that failed, once its source is free; later ones may still succeed."""
        _settle(self._session.opened.store_stream)
        _settle(self._session.device.down)
        self._session.note(STORED, job.sequence)
        self._session.post(StoreFailed(job.session, job.entry, _text(error)))

    def refuse(self, job: StoreJob) -> None:
        """Answer a job that was not begun because the session ended."""
        self._session.post(StoreFailed(job.session, job.entry, SKIPPED))

    def _copied(self, job: StoreJob, scratch: Scratch, block: Block, problem: str) -> None:
        """Answer the store: its blob lies in the pool, or `problem` says why it does not."""
        session = self._session
        if problem:
            job.space.unplace(block, job.promised)
            session.post(StoreFailed(job.session, job.entry, problem))
        else:
            mode = Mode(scratch.words[2]).name.lower()
            coding, copying = scratch.seconds()
            session.device.link.copied("store", block.nbytes, copying)
            session.post(StoreDone(job.session, job.entry, block, mode, coding + copying))
        session.stores.give_back(scratch)


class _Restores:
    """The stages of a restore: copy up, then decode into the client's memory."""

    def __init__(self, session: CudaSession) -> None:
        self._session = session

    def begin(self, job: RestoreJob, scratch: Scratch) -> None:
        """Put the copy on the link, and the decoder behind it and the client's counter."""
        session, device = self._session, self._session.device
        stream = session.opened.restore_stream.handle
        scratch.words[0] = UNWRITTEN
        with span("copy up", job.block.nbytes, job.entry):
            device.upload(job.block, scratch)
        wait_event(stream, scratch.copied)
        wait_value(stream, session.counter(PUBLISHED), job.sequence)
        scratch.code_began.record(stream)
        with span("decode", job.nbytes, job.entry):
            device.codec.decode(
                device.kind(job.block),
                (scratch.blob.address, job.block.nbytes),
                (session.address(job), job.nbytes),
                scratch=scratch.work.address,
                result=scratch.result.device_address,
                stream=stream,
            )
        scratch.coded.record(stream)

    def finish(self, job: RestoreJob, scratch: Scratch) -> bool:
        """Answer the restore once the decoder has verified what it wrote."""
        session = self._session
        scratch.coded.synchronize()
        status = int(scratch.words[0])
        if status:
            raise CorruptBlob(session.device.codec.explain(status))
        coding, copying = scratch.seconds()
        session.device.link.copied("restore", job.block.nbytes, copying)
        session.note(RESTORED, job.sequence)
        session.post(RestoreDone(job.session, job.ticket, coding + copying))
        return True

    def fail(self, job: RestoreJob, error: Exception) -> None:
        """Answer a restore that failed, once nothing of it is under way."""
        _settle(self._session.device.up)
        _settle(self._session.opened.restore_stream)
        kind = "CorruptBlob" if isinstance(error, CorruptBlob) else "ActivationLost"
        self._session.post(RestoreFailed(job.session, job.ticket, kind, _text(error)))

    def refuse(self, job: RestoreJob) -> None:
        """Answer a job that was not begun because the session ended."""
        self._session.post(RestoreFailed(job.session, job.ticket, "ActivationLost", SKIPPED))


def _opened(page: SharedMemory, device: CudaDevice, part_bytes: int) -> _Open:
    """Make a session's device objects; on an error nothing is kept.

    Raises:
        CudaDriverError: the device gives no memory or stream.
    """
    with ExitStack() as made:
        registered = made.enter_context(closing(RegisteredHost(page.address, PAGE_BYTES)))
        _, greatest = device.context.priorities()
        streams = [made.enter_context(closing(Stream(greatest))) for _ in range(2)]
        scratch = [
            made.enter_context(closing(Scratch(device, part_bytes)))
            for _ in range(2 * PARTS_UNDER_WAY)
        ]
        made.pop_all()
    return _Open(registered, streams[0], streams[1], tuple(scratch))


def _encoded_bytes(job: StoreJob, scratch: Scratch) -> int:
    """Return the size that the encoder left, checked before it is used to place and copy."""
    nbytes, status = int(scratch.words[0]), int(scratch.words[1])
    assert status == 0, f"the encoder left status {status:#x}"
    assert 0 < nbytes <= blob_bound(job.nbytes), f"{nbytes} bytes encoded from {job.nbytes}"
    return nbytes


def _text(error: Exception) -> str:
    """Return the error as the client is told."""
    return f"{type(error).__name__}: {error}"[:1000]


def _settle(stream: Stream) -> None:
    """Wait until the stream is done; where the device is broken, nothing runs on it any more."""
    try:
        stream.synchronize()
    except CudaDriverError as error:
        log.error("the device is broken: %s", error)  # noqa: TRY400 - its job's error is logged


def _meet(barrier: threading.Barrier) -> None:
    """Wait for the other thread. It comes: calls are made even when the session has ended."""
    barrier.wait()
