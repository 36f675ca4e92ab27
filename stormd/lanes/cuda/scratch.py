"""Device memory for blobs while they are coded and copied, shared by stores and restores.

Each batch has space for its blobs that overlaps no other batch's. A chunk of a session's largest
size finds space at the latest when its direction has nothing in flight.

The space is shared by bytes, not by batches. So the same few hundred MiB suffice for large chunks,
which cost the trainer the fewest interruptions per byte, and for many small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from time import monotonic
from typing import Final

from storm_kernels.ancf.cuda_launches import BlobKind
from storm_kernels.cuda_driver import DeviceBuffer, Event, MappedHost, elapsed_seconds
from storm_kernels.errors import CudaDriverError

from stormd.lanes.cuda.device import CudaDevice
from stormd.lanes.cuda.direct import StoreState, should_copy_unencoded
from stormd.lanes.cuda.ring import RingPair, Side
from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import RestoreJob, StoreJob
from stormd.memory.arena import GRANULE, Block, granules

__all__ = [
    "RESULT_WORDS",
    "DirectionScratch",
    "Scratch",
    "SessionScratch",
    "StoreScratch",
    "Transit",
    "UnencodedCopy",
    "session_chunks",
]

SHARED_CHUNKS: Final = 2
"""The space that either direction may have, as a number of the largest chunks."""

SHARED_CHUNKS_WITHOUT_MPS: Final = 4
"""The same where the daemon and a trainer take turns on the GPU: long turns cost less per byte."""

MAX_BATCHES: Final = 16
"""Most batches in flight per direction, however small they are."""

MAX_UNENCODED: Final = 16
"""Most chunks that are copied directly, including those that wait for their checksums. The link
carries fewer during two kernels of 10 ms."""

MAX_CHUNKS_OF_BATCH: Final = 8
"""Most chunks in a batch of small chunks."""

MAX_BATCH_BYTES: Final = 8 << 20
"""Most bytes of chunks that make up a batch. At this size their shared costs are small, and the
first chunk waits at most 0.2 ms for the last."""

RESULT_WORDS: Final = 8
"""Words of mapped host memory per chunk: the codec writes a blob's size, status and mode there."""


class Transit:
    """A batch's copy on the link: its begin and end, and for stores the blocks of its blobs.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self) -> None:
        with ExitStack() as made:
            # No thread sleeps until the device passes these events: see Pipeline.
            self.copy_began, self.copied = (made.enter_context(closing(_event())) for _ in range(2))
            self._made = made.pop_all()
        self.placed: list[Block] = []
        self.copy_end_time = 0.0
        """When the copy ends on a link with a limit; 0.0 on a link without one."""

    def copying_seconds(self) -> float:
        """Return how long the device copied; the copy must have ended."""
        return elapsed_seconds(self.copy_began, self.copied)

    def close(self) -> None:
        """Free all of it; no stream may use it any more."""
        self._made.close()


class Scratch(Transit):
    """What one batch needs in flight: events, and memory for the codec's results and working data.

    `blob_addresses` are on the device. For stores, `guessed` names per chunk the only encoder
    pipeline that was launched, None where none was guessed. For restores, `kinds` are the kinds of
    the blobs, and `is_coding` says whether the decoders are on their stream.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, work_bytes: int) -> None:
        super().__init__()
        with ExitStack() as made:
            made.push(self._made)
            self.work = made.enter_context(closing(DeviceBuffer(work_bytes)))
            result_bytes = 8 * RESULT_WORDS * MAX_CHUNKS_OF_BATCH
            self.result = made.enter_context(closing(MappedHost(result_bytes)))
            self.code_began, self.coded = (made.enter_context(closing(_event())) for _ in range(2))
            self._made = made.pop_all()
        self.words = self.result.words()
        self.taken = range(0)
        """The byte range of the ring that the batch uses."""
        self.blob_addresses: list[int] = []
        self.kinds: list[BlobKind] = []
        self.guessed: list[str | None] = []
        self.is_coding = False

    def coding_seconds(self) -> float:
        """Return how long the device coded; the coding must have ended."""
        return elapsed_seconds(self.code_began, self.coded)


class UnencodedCopy(Transit):
    """What a chunk needs that is copied to the pool directly: no device memory, but a checksum."""

    def __init__(self) -> None:
        super().__init__()
        self.checksum: Future[int] = Future()

    @property
    def is_on_link(self) -> bool:
        """Whether its copy has not ended; also True on a broken device."""
        try:
            return not self.copied.done()
        except CudaDriverError:
            return True


class SessionScratch:
    """The scratch of a session with chunks of up to `chunk_bytes`: one memory for both directions.

    Under MPS, stores of at least `direct_bytes` may be copied directly; 0 disables that.

    A forward pass stores and a backward pass restores. So each direction has space for one chunk of
    its own, and the direction that needs more also gets the shared space while the other uses none
    of it. A restore that holds space may wait for its client, and the client may wait for a store.

    Taking turns with a trainer costs both sides more than coding a chunk. So without MPS, once a
    direction's space is full, new batches begin only when half of it is free.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, device: CudaDevice, chunk_bytes: int, direct_bytes: int) -> None:
        rings = RingPair(
            _batch_bytes_bound(chunk_bytes),
            _shared_chunks(device) * _batch_bytes_bound(chunk_bytes),
            MAX_BATCHES,
            by_halves=not device.is_shared_by_mps,
        )
        work_bytes = device.codec.scratch_bytes(chunk_bytes)
        with ExitStack() as made:
            memory = made.enter_context(closing(DeviceBuffer(rings.nbytes)))
            out, self.back = (
                made.enter_context(
                    closing(DirectionScratch(rings, side, memory.address, chunk_bytes, work_bytes))
                )
                for side in (Side.LOW, Side.HIGH)
            )
            self.out = made.enter_context(closing(StoreScratch(device, out, direct_bytes)))
            self._made = made.pop_all()

    def close(self) -> None:
        """Free all of it; no stream may use it any more."""
        self._made.close()


class DirectionScratch:
    """One direction's scratch: a `side` of the memory at `address`, and `work_bytes` per batch.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(
        self, rings: RingPair, side: Side, address: int, chunk_bytes: int, work_bytes: int
    ) -> None:
        self._rings = rings
        self._side = side
        self._address = address
        self.max_batch_bytes = min(chunk_bytes, MAX_BATCH_BYTES)
        with ExitStack() as made:
            self._free = [
                made.enter_context(closing(Scratch(work_bytes))) for _ in range(MAX_BATCHES)
            ]
            self._made = made.pop_all()

    def fits(
        self, batch: Sequence[StoreJob] | Sequence[RestoreJob], job: StoreJob | RestoreJob
    ) -> bool:
        """Return whether the job may be done together with those of `batch`."""
        nbytes = job.nbytes + sum(one.nbytes for one in batch)
        return len(batch) < MAX_CHUNKS_OF_BATCH and nbytes <= self.max_batch_bytes

    def has_for(self, job: StoreJob | RestoreJob) -> bool:
        is_alone = job.nbytes >= self.max_batch_bytes  # no other job fits into its batch
        nbytes = _blob_bytes_of(job) if is_alone else _batch_bytes_bound(self.max_batch_bytes)
        return self._rings.has(self._side, nbytes)

    def find_overtaking_job(self, waiting: object) -> int | None:  # noqa: ARG002 - none is like that
        """Return None: every job waits for space."""
        return None

    def take(self, batch: Sequence[StoreJob] | Sequence[RestoreJob]) -> Scratch:
        scratch = self._free.pop()
        sizes = [_blob_bytes_of(job) for job in batch]
        scratch.taken = self._rings.take(self._side, sum(sizes))
        scratch.blob_addresses = []
        address = self._address + scratch.taken.start
        for size in sizes:
            scratch.blob_addresses.append(address)
            address += size
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        self._rings.give_back(self._side, scratch.taken)
        self._free.append(scratch)

    def close(self) -> None:
        """Free all of it; no stream may use it any more."""
        self._made.close()


class StoreScratch:
    """The scratch of stores: space in the ring, or only a record for a chunk copied directly.

    Chunks are copied directly only under MPS: there encoders wait for whole kernels of the trainer,
    but copies wait for none.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, device: CudaDevice, ring: DirectionScratch, direct_bytes: int) -> None:
        self._device = device
        self._ring = ring
        self._direct_bytes = max(direct_bytes, ring.max_batch_bytes + 1)  # one a batch
        may_be_direct = direct_bytes > 0 and device.is_shared_by_mps
        with ExitStack() as made:
            self._free = [
                made.enter_context(closing(UnencodedCopy()))
                for _ in range(MAX_UNENCODED if may_be_direct else 0)
            ]
            self._made = made.pop_all()
        self._unencoded_job: StoreJob | None = None
        """The job that is to be copied directly, as found by `has_for` or `find_overtaking_job`."""
        self._encoding: list[Transit] = []
        self._blobs: list[Transit] = []
        self._copies: list[UnencodedCopy] = []
        """The direct copies on the link, as of the last check."""
        self._since = 0.0
        """When the oldest queued batch of encoders became the oldest one."""

    def fits(self, batch: Sequence[StoreJob], job: StoreJob) -> bool:
        """Return whether the job may be done together with those of `batch`."""
        return self._ring.fits(batch, job)

    def has_for(self, job: StoreJob) -> bool:
        self._unencoded_job = None
        may_be_direct = self._may_copy_unencoded(job)
        # Ask the ring only if its space would be taken: a True keeps the other direction from it
        # until then.
        if not (may_be_direct and job.chunk.codec == "raw") and self._ring.has_for(job):
            return True
        return may_be_direct and self._can_copy_unencoded(job)

    def find_overtaking_job(self, waiting: Iterable[tuple[int, StoreJob]]) -> int | None:
        """Return the place of the first large chunk if it can be copied directly now.

        A direct copy needs no space in the ring.
        """
        for place, job in waiting:
            if self._may_copy_unencoded(job):
                return place if self._can_copy_unencoded(job) else None
        return None

    def take(self, batch: Sequence[StoreJob]) -> Scratch | UnencodedCopy:
        if batch[0] is self._unencoded_job:
            direct = self._free.pop()
            self._copies.append(direct)
            return direct
        scratch = self._ring.take(batch)
        if not self._encoding:
            self._since = monotonic()
        self._encoding.append(scratch)
        return scratch

    def encoded(self, scratch: Scratch) -> None:
        """Note that a batch's blobs are encoded: the next encoder has its turn."""
        self._encoding.remove(scratch)
        self._blobs.append(scratch)
        self._since = monotonic()

    def give_back(self, scratch: Scratch | UnencodedCopy) -> None:
        if isinstance(scratch, UnencodedCopy):
            self._copies = [copy for copy in self._copies if copy is not scratch]
            self._free.append(scratch)
            return
        for under_way in (self._encoding, self._blobs):
            if scratch in under_way:
                under_way.remove(scratch)
        self._ring.give_back(scratch)

    def close(self) -> None:
        """Free the records; no stream may use them any more."""
        self._made.close()

    def _may_copy_unencoded(self, job: StoreJob) -> bool:
        return bool(self._free) and job.nbytes >= self._direct_bytes

    def _can_copy_unencoded(self, job: StoreJob) -> bool:
        self._unencoded_job = (
            job if should_copy_unencoded(job.chunk.codec, self._store_state()) else None
        )
        return self._unencoded_job is not None

    def _store_state(self) -> StoreState:
        self._copies = [scratch for scratch in self._copies if scratch.is_on_link]
        return StoreState(
            encoders_wait=monotonic() - self._since if self._encoding else 0.0,
            blobs=len(self._blobs),
            copies=len(self._copies),
            link_is_idle=self._device.is_link_idle(),
        )


def session_chunks(device: CudaDevice) -> int:
    """Return the space that a session takes on a device, as a number of its largest chunks."""
    return 2 + _shared_chunks(device)


def _event() -> Event:
    return Event(timed=True, awaited=False)


def _shared_chunks(device: CudaDevice) -> int:
    return SHARED_CHUNKS if device.is_shared_by_mps else SHARED_CHUNKS_WITHOUT_MPS


def _blob_bytes_of(job: StoreJob | RestoreJob) -> int:
    """Return the bytes of the job's blob: an upper bound while the size is not known."""
    known = job.block.nbytes if isinstance(job, RestoreJob) else blob_bound(job.nbytes)
    return granules(known)


def _batch_bytes_bound(nbytes: int) -> int:
    """Return the most bytes that a batch's blobs of `nbytes` take, for any number of chunks."""
    return granules(nbytes) + MAX_CHUNKS_OF_BATCH * (blob_bound(0) + GRANULE)
