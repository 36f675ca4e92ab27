"""Restores into one client's GPU memory: copy up from the pool, then decode on the device.

A destination is written only once the `published` counter allows it. Behind each decoder the stream
writes the restore's ticket, for which a client's stream may wait. The decoder's status lies in the
session's page, where a client can read it if it must know without this daemon. RestoreDone is
posted once the daemon has read the status.
"""

from __future__ import annotations

from storm_kernels.cuda_driver import wait_event, write_value
from storm_kernels.errors import CorruptBlob

from stormd.lanes.cuda.client import SKIPPED, UNWRITTEN, CudaClient, error_text
from stormd.lanes.cuda.scratch import RESULT_WORDS, Scratch
from stormd.ledger.events import RestoreDone, RestoreFailed, RestoreJob, Result
from stormd.protocol.timeline import restored_slot, status_slot

__all__ = ["Restores"]


class Restores:
    """The stages of a restore: copy up, then decode once the destination may be written."""

    def __init__(self, client: CudaClient) -> None:
        self._client = client
        self._in_page: dict[int, int] = {}
        """Maps the word of the page that receives a decoder's status to the restore's ticket."""

    def is_due(self, job: RestoreJob) -> bool:  # noqa: ARG002 - copies may come before
        """Return True: the blob may be copied at any time, into the daemon's own memory."""
        return True

    def fits(self, batch: list[RestoreJob], job: RestoreJob) -> bool:
        """Return whether the job fits into the batch without making the batch wait longer.

        A client's stream may wait for the batch's first restore before it reaches the point that
        the job waits for.
        """
        is_due = job.sequence <= _last(batch) or self._client.has_published(job.sequence)
        return is_due and self._client.opened.scratch.back.fits(batch, job)

    def begin(self, batch: list[RestoreJob], scratch: Scratch) -> None:
        """Put the copies of the blobs on the link."""
        device = self._client.device
        scratch.kinds = [device.kind(job.block) for job in batch]
        scratch.is_coding = False
        scratch.copy_began.record(device.up.handle)
        for job, room in zip(batch, scratch.blob_addresses, strict=True):
            scratch.copy_end_time = device.limit.end_time("restore", job.block.nbytes)
            device.copy_up(job.block, room)
        scratch.copied.record(device.up.handle)

    def may_finish_out_of_order(self, scratch: Scratch) -> bool:  # noqa: ARG002 - none of them
        """Return False: restores finish in the order in which they were begun."""
        return False

    def is_done(self, batch: list[RestoreJob], scratch: Scratch) -> bool:
        """Return whether the destinations may be written, or, once begun, decoding has ended."""
        if scratch.is_coding:
            is_over = self._client.device.limit.has_ended(scratch.copy_end_time)
            return scratch.coded.done() and is_over
        return self._client.has_published(_last(batch))

    def advance(self, batch: list[RestoreJob], scratch: Scratch) -> bool:
        """Put the decoders behind the copies, or answer once they have verified their output."""
        if scratch.is_coding:
            self._answer(batch, scratch)
            return True
        self._decode(batch, scratch)
        return False

    def settle(self) -> None:
        device = self._client.device
        device.settle(device.up)
        device.settle(self._client.opened.restore_stream)

    def fail(self, batch: list[RestoreJob], scratch: Scratch, error: Exception) -> None:  # noqa: ARG002 - nothing is placed
        """Answer restores that failed; they have nothing in flight."""
        for job in batch:
            self._free_status(job)
        self._client.post(*(_failed(job, error) for job in batch))

    def refuse(self, job: RestoreJob) -> None:
        self._client.post(job.failed("ActivationLost", SKIPPED))

    def _decode(self, batch: list[RestoreJob], scratch: Scratch) -> None:
        client, device = self._client, self._client.device
        stream = client.opened.restore_stream.handle
        wait_event(stream, scratch.copied)
        scratch.code_began.record(stream)
        blobs = zip(batch, scratch.kinds, scratch.blob_addresses, strict=True)
        for index, (job, kind, room) in enumerate(blobs):
            status = self._place_status(job, scratch, index)
            device.codec.decode(
                kind,
                (room, job.block.nbytes),
                (client.address(job), job.nbytes),
                scratch=scratch.work.address,
                result=status,
                stream=stream,
            )
            write_value(stream, client.counter(restored_slot(job.ticket)), job.ticket)
        scratch.coded.record(stream)
        scratch.is_coding = True

    def _answer(self, batch: list[RestoreJob], scratch: Scratch) -> None:
        client, copying, coding = self._client, scratch.copying_seconds(), scratch.coding_seconds()
        client.device.link.coded("restore", sum(job.nbytes for job in batch), coding)
        client.device.link.copied("restore", sum(job.block.nbytes for job in batch), copying)
        each = (copying + coding) / len(batch)
        results = [self._result(job, scratch, n, each) for n, job in enumerate(batch)]
        client.post(*results)

    def _result(self, job: RestoreJob, scratch: Scratch, index: int, seconds: float) -> Result:
        status = self._status(job, scratch, index)
        self._free_status(job)
        if status:
            return _failed(job, CorruptBlob(self._client.device.codec.explain(status)))
        return RestoreDone(session=job.session, ticket=job.ticket, seconds=seconds)

    def _place_status(self, job: RestoreJob, scratch: Scratch, index: int) -> int:
        """Return the device address for a decoder's status: in the session's page.

        The address is in scratch if another restore with the same counter has its status in the
        page: then no stream waits for the counter on behalf of this job.
        """
        word = status_slot(job.ticket)
        if word in self._in_page:
            scratch.words[index * RESULT_WORDS] = UNWRITTEN
            return scratch.result.device_address + 8 * index * RESULT_WORDS
        self._in_page[word] = job.ticket
        self._client.timelines.put(word, UNWRITTEN)
        return self._client.counter(word)

    def _status(self, job: RestoreJob, scratch: Scratch, index: int) -> int:
        word = status_slot(job.ticket)
        if self._in_page.get(word) == job.ticket:
            return self._client.timelines.read(word)
        return int(scratch.words[index * RESULT_WORDS])

    def _free_status(self, job: RestoreJob) -> None:
        word = status_slot(job.ticket)
        if self._in_page.get(word) == job.ticket:
            del self._in_page[word]


def _last(batch: list[RestoreJob]) -> int:
    """Return the value of `published` at which all destinations may be written."""
    return max(job.sequence for job in batch)


def _failed(job: RestoreJob, error: Exception) -> RestoreFailed:
    kind = "CorruptBlob" if isinstance(error, CorruptBlob) else "ActivationLost"
    return job.failed(kind, error_text(error))
