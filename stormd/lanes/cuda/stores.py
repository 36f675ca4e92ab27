"""Stores from one client's GPU memory: encode on the device, then copy down to the pool.

A source is read only once the `published` counter says that it is ready. The `stored` counter says
through which number sources may be reused. An encoder's result is checked before it is used to
place a blob.

`stored` has one writer. If a session ends with the daemon, that writer is the store stream, behind
the encoders. If another daemon can continue the session, no source may be reused while its blob is
only in this process's device memory. The event loop then raises `stored`, when the journal says
where the blob is.

The sizes of a batch's blobs are known, and their blocks placed, only once the codec is done with
the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from storm_kernels.ancf import DType
from storm_kernels.ancf.header import Header
from storm_kernels.ancf.layout import HEADER_BYTES, Mode
from storm_kernels.ancf.plan import Plan
from storm_kernels.cuda_driver import write_value

from stormd.lanes.cuda.client import SKIPPED, UNWRITTEN, CudaClient, error_text
from stormd.lanes.cuda.guesses import Guesses
from stormd.lanes.cuda.reusable_through import ReusableThrough
from stormd.lanes.cuda.scratch import RESULT_WORDS, Scratch, UnencodedCopy
from stormd.ledger.events import StoreDone, StoreFailed, StoreJob
from stormd.memory.arena import Block
from stormd.protocol.timeline import STORED

__all__ = ["Stores"]

log = logging.getLogger(__name__)

MODE_NAMES: Final = {int(mode): mode.name.lower() for mode in Mode}


class EncoderResult(NamedTuple):
    """What an encoder writes; none of it has been checked."""

    nbytes: int
    status: int
    mode: int


class Stores:
    """The stages of a store: encode from the client's memory, then copy down."""

    def __init__(self, client: CudaClient) -> None:
        self._client = client
        self._reusable = ReusableThrough()
        self._guesses = Guesses()

    def expect(self, sequence: int) -> None:
        """Expect the number of a store that will follow or was rejected; for the event loop."""
        self._reusable.expect(sequence)

    def recorded(self, sequences: Sequence[int]) -> None:
        """Allow the reuse of sources whose outcomes are recorded; for the event loop."""
        self._client.timelines.store(STORED, self._reusable.done(sequences))

    def release_source(self, sequence: int) -> None:
        """Note that the source of that store is not read any more; for the store thread.

        The stream raises the counter behind the encoders on it, whose numbers count as done
        already.
        """
        if not self._client.is_resumable:
            self._client.stored_through(self._reusable.done([sequence]))

    def is_due(self, job: StoreJob) -> bool:
        return self._client.has_published(job.sequence)

    def fits(self, batch: list[StoreJob], job: StoreJob) -> bool:
        return self._client.opened.scratch.out.fits(batch, job)

    def begin(self, batch: list[StoreJob], scratch: Scratch | UnencodedCopy) -> None:
        """Put the encoders on the store stream, then the write that frees the sources for reuse."""
        scratch.placed.clear()
        if isinstance(scratch, UnencodedCopy):
            self._copy_unencoded(batch[0], scratch)
        else:
            self._encode_all(batch, scratch)

    def may_finish_out_of_order(self, scratch: Scratch | UnencodedCopy) -> bool:
        """Return whether the chunk is copied directly: it does not wait for encoders."""
        return isinstance(scratch, UnencodedCopy)

    def is_done(self, _batch: list[StoreJob], scratch: Scratch | UnencodedCopy) -> bool:
        """Return whether the blobs are encoded, or, once placed, copied to the pool."""
        limit = self._client.device.limit
        if isinstance(scratch, UnencodedCopy):
            self._client.opened.checks.refresh()
            is_copied = scratch.checksum.done() and scratch.copied.done()
            return is_copied and limit.has_ended(scratch.copy_end_time)
        if scratch.placed:
            return scratch.copied.done() and limit.has_ended(scratch.copy_end_time)
        return scratch.coded.done()

    def advance(self, batch: list[StoreJob], scratch: Scratch | UnencodedCopy) -> bool:
        """Put the copies of the blobs on the link, or answer if they have ended."""
        if isinstance(scratch, UnencodedCopy):
            self._complete(batch[0], scratch)
            return True
        if scratch.placed:
            self._answer(batch, scratch)
            return True
        self._client.opened.scratch.out.encoded(scratch)
        sources = self._sources(batch, scratch)
        if sources:
            self._copy_down(batch, scratch, sources)
        return not sources

    def settle(self) -> None:
        device, opened = self._client.device, self._client.opened
        for stream in (opened.store_stream, opened.checks.stream, device.down):
            device.settle(stream)

    def fail(
        self, batch: list[StoreJob], scratch: Scratch | UnencodedCopy, error: Exception
    ) -> None:
        """Answer stores that failed; their sources are reusable, and later stores may succeed."""
        if isinstance(scratch, UnencodedCopy):
            scratch.checksum.cancel()
        for job, block in zip(batch, scratch.placed, strict=False):  # only some, if one failed
            job.unplace(block)
        for job in batch:
            self._fail(job, error)

    def refuse(self, job: StoreJob) -> None:
        self._client.post(self._failed(job, SKIPPED))

    def _encode_all(self, batch: list[StoreJob], scratch: Scratch) -> None:
        client, stream = self._client, self._client.opened.store_stream.handle
        scratch.guessed.clear()
        scratch.code_began.record(stream)
        for index, (job, room) in enumerate(zip(batch, scratch.blob_addresses, strict=True)):
            self._encode(job, scratch, index, room)
        if not client.is_resumable:
            through = self._reusable.done(job.sequence for job in batch)
            write_value(stream, client.counter(STORED), through)
        scratch.coded.record(stream)

    def _copy_unencoded(self, job: StoreJob, scratch: UnencodedCopy) -> None:
        """Put the source's copy on the link, and have the device read it for its checksum."""
        device, source = self._client.device, self._client.address(job)
        block = job.place(HEADER_BYTES + job.nbytes)
        scratch.placed.append(block)
        scratch.copy_began.record(device.down.handle)
        scratch.copy_end_time = device.limit.end_time("store", block.nbytes)
        device.copy_down(source, block, HEADER_BYTES)
        scratch.copied.record(device.down.handle)
        scratch.checksum = self._client.opened.checks.add(source, job.nbytes)

    def _complete(self, job: StoreJob, scratch: UnencodedCopy) -> None:
        """Write the header in front of the bytes, which are in the pool, and answer."""
        client, (block,) = self._client, scratch.placed
        checksum, seconds = scratch.checksum.result(), scratch.copying_seconds()
        header = Header(Plan(Mode.RAW), DType.BYTES, job.nbytes, 0, checksum)
        client.device.put_header(block, header.pack())
        self.release_source(job.sequence)
        client.device.link.copied("store", block.nbytes, seconds)
        client.post(self._done(job, block, Mode.RAW, seconds))

    def _encode(self, job: StoreJob, scratch: Scratch, index: int, room: int) -> None:
        first, chunk = index * RESULT_WORDS, job.chunk
        scratch.words[first], scratch.words[first + 1] = 0, UNWRITTEN
        is_raw = chunk.codec == "raw"
        likely = None if is_raw else self._guesses.likely(chunk.nbytes, chunk.dtype)
        scratch.guessed.append(likely)
        self._client.device.codec.encode(
            (self._client.address(job), job.nbytes),
            chunk.dtype,
            (room, chunk.bound),
            raw=is_raw,
            scratch=scratch.work.address,
            result=scratch.result.device_address + 8 * first,
            stream=self._client.opened.store_stream.handle,
            likely=likely,
        )

    def _sources(self, batch: list[StoreJob], scratch: Scratch) -> list[tuple[int, EncoderResult]]:
        """Return the blobs' addresses and encoder results; answer and drop jobs that failed."""
        found: list[tuple[int, EncoderResult]] = []
        for index, (job, room) in enumerate(zip(tuple(batch), scratch.blob_addresses, strict=True)):
            try:
                result = _encoded(job, scratch, index)
                found.append((room, result))
                self._learn(job, scratch.guessed[index], result)
            except Exception as error:
                log.exception("entry %d cannot be stored", job.entry)
                batch.remove(job)
                self._fail(job, error)
        return found

    def _learn(self, job: StoreJob, guessed: str | None, result: EncoderResult) -> None:
        chunk = job.chunk
        if chunk.codec != "raw":
            self._guesses.learn(chunk.nbytes, chunk.dtype, guessed, MODE_NAMES[result.mode])

    def _copy_down(
        self, batch: list[StoreJob], scratch: Scratch, sources: list[tuple[int, EncoderResult]]
    ) -> None:
        """Place the blobs and put their copies on the link."""
        device = self._client.device
        scratch.copy_began.record(device.down.handle)
        for index, (job, (source, result)) in enumerate(zip(batch, sources, strict=True)):
            scratch.words[index * RESULT_WORDS + 2] = result.mode
            block = job.place(result.nbytes)
            scratch.placed.append(block)
            scratch.copy_end_time = device.limit.end_time("store", block.nbytes)
            device.copy_down(source, block)
        scratch.copied.record(device.down.handle)

    def _answer(self, batch: list[StoreJob], scratch: Scratch) -> None:
        client, blocks = self._client, scratch.placed
        copying = scratch.copying_seconds()
        coding = scratch.coding_seconds()
        client.device.link.coded("store", sum(job.nbytes for job in batch), coding)
        client.device.link.copied("store", sum(block.nbytes for block in blocks), copying)
        each = (coding + copying) / len(batch)
        modes = scratch.words[2::RESULT_WORDS]
        answers = zip(batch, blocks, modes, strict=False)
        client.post(*(self._done(job, block, mode, each) for job, block, mode in answers))

    def _fail(self, job: StoreJob, error: Exception) -> None:
        self.release_source(job.sequence)
        self._client.post(self._failed(job, error_text(error)))

    def _failed(self, job: StoreJob, detail: str) -> StoreFailed:
        return job.failed("ActivationLost", detail, self._awaited(job))

    def _done(self, job: StoreJob, block: Block, mode: int, seconds: float) -> StoreDone:
        return StoreDone(
            session=job.session,
            entry=job.entry,
            block=block,
            mode=MODE_NAMES[mode],
            seconds=seconds,
            sequence=self._awaited(job),
        )

    def _awaited(self, job: StoreJob) -> int:
        """Return the number that `recorded` is to name; 0 if nothing waits for it."""
        return job.sequence if self._client.is_resumable else 0


def _encoded(job: StoreJob, scratch: Scratch, index: int) -> EncoderResult:
    """Return the encoder's result, after checking the size that is used to place and copy.

    Raises:
        RuntimeError: the encoder failed, or its size is not that of a blob.
    """
    result = EncoderResult(*scratch.words[index * RESULT_WORDS : index * RESULT_WORDS + 3])
    if result.status or not 0 < result.nbytes <= job.chunk.bound:
        raise RuntimeError(
            f"the encoder left status {result.status:#x} and {result.nbytes} bytes for {job.nbytes}"
        )
    return result
