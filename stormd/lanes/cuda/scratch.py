"""Device memory in which blobs lie while they are coded and copied, shared by both directions.

A batch has room for its blobs, apart from all others', and a chunk as large as the session's chunks
may be finds room at the latest when nothing of its direction is in flight.

Room is shared by bytes, not by batches: large chunks, which cost the trainer the fewest
interruptions for their bytes, and many small ones need the same few hundred MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from time import monotonic
from typing import Final

from storm_kernels.ancf.cuda_launches import BlobKind
from storm_kernels.cuda_driver import DeviceBuffer, Event, MappedHost, elapsed_seconds
from storm_kernels.errors import CudaDriverError

from stormd.lanes.cuda.checks import Check
from stormd.lanes.cuda.device import CudaDevice
from stormd.lanes.cuda.direct import Outlook, goes_direct
from stormd.lanes.cuda.ring import RingPair, Side
from stormd.ledger.events import RestoreJob, StoreJob
from stormd.ledger.parts import blob_bound
from stormd.memory.arena import GRANULE, Block, granules

__all__ = [
    "RESULT_WORDS",
    "DirectScratch",
    "DirectionScratch",
    "Scratch",
    "SessionScratch",
    "StoreScratch",
    "Transit",
    "session_parts",
]

SHARED_PARTS: Final = 2
"""For so many of the largest chunks there is room that either direction may have."""

SHARED_PARTS_IN_TURNS: Final = 4
"""The same where the daemon and a trainer take turns, which cost less for their bytes if long."""

BATCHES_UNDER_WAY: Final = 16
"""In a direction, however small they are."""

DIRECT_UNDER_WAY: Final = 16
"""Chunks that are copied as they are, those among them that wait for their checksums: more than the
link carries beside two kernels of 10 ms."""

PARTS_TOGETHER: Final = 8
"""Small chunks that may make up a batch."""

BYTES_TOGETHER: Final = 8 << 20
"""Of chunks that are done together: what they share costs little then, and the first of them waits
for the last no longer than 0.2 ms."""

RESULT_WORDS: Final = 8
"""Words of mapped host memory for each: the codec leaves a blob's size, status and mode there."""


class Transit:
    """A batch's copy on the link: its begin and end, and, on the way out, where it goes.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self) -> None:
        with ExitStack() as made:
            # Nobody sleeps until they are passed: see Pipeline.
            self.copy_began, self.copied = (made.enter_context(closing(_event())) for _ in range(2))
            self._made = made.pop_all()
        self.placed: list[Block] = []
        self.over_at = 0.0
        """When the copy is over on a link that is limited, 0.0 on one that is not."""

    def copying_seconds(self) -> float:
        """Return how long the device copied; that is over."""
        return elapsed_seconds(self.copy_began, self.copied)

    def close(self) -> None:
        """Free all of it; no stream uses it any more."""
        self._made.close()


class Scratch(Transit):
    """What one batch needs in flight: events, and memory for what the codec says and sorts.

    `rooms` are the device addresses of its blobs. On the way out, `guessed` is which pipelines
    alone were launched, None where that was not guessed. On the way back, `kinds` is what they are,
    and `is_coding` whether the decoders are on their stream.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, work_bytes: int) -> None:
        super().__init__()
        with ExitStack() as made:
            made.push(self._made)
            self.work = made.enter_context(closing(DeviceBuffer(work_bytes)))
            result_bytes = 8 * RESULT_WORDS * PARTS_TOGETHER
            self.result = made.enter_context(closing(MappedHost(result_bytes)))
            self.code_began, self.coded = (made.enter_context(closing(_event())) for _ in range(2))
            self._made = made.pop_all()
        self.words = self.result.words()
        self.taken = range(0)
        """Of the ring, by bytes."""
        self.rooms: list[int] = []
        self.kinds: list[BlobKind] = []
        self.guessed: list[str | None] = []
        self.is_coding = False

    def coding_seconds(self) -> float:
        """Return how long the device coded; that is over."""
        return elapsed_seconds(self.code_began, self.coded)


class DirectScratch(Transit):
    """What a chunk needs that is copied to the pool as it is: no memory, and a checksum."""

    def __init__(self) -> None:
        super().__init__()
        self.check: Check | None = None

    @property
    def is_on_link(self) -> bool:
        """Whether its copy has not ended; so it is on a device that is broken, too."""
        try:
            return not self.copied.done()
        except CudaDriverError:
            return True


class SessionScratch:
    """The scratch of a session whose chunks are of up to `part_bytes`: one memory, two directions.

    Stores of `direct_bytes` and more may be copied as they are under MPS; none where that is 0.

    A forward pass stores and a backward pass restores. So each has room for a part of its own, and
    whoever needs more has the room that is shared, too, while the other has nothing there. What a
    restore has taken may wait for its client, which may wait for a store.

    Taking turns with a trainer costs both sides more than coding a chunk. So where there is no MPS,
    batches are begun again only when half of a direction's room is free.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, device: CudaDevice, part_bytes: int, direct_bytes: int) -> None:
        rings = RingPair(
            _room_for(part_bytes),
            _shared_parts(device) * _room_for(part_bytes),
            BATCHES_UNDER_WAY,
            by_halves=not device.is_shared_by_mps,
        )
        work_bytes = device.codec.scratch_bytes(part_bytes)
        with ExitStack() as made:
            memory = made.enter_context(closing(DeviceBuffer(rings.nbytes)))
            out, self.back = (
                made.enter_context(
                    closing(DirectionScratch(rings, side, memory.address, part_bytes, work_bytes))
                )
                for side in (Side.LOW, Side.HIGH)
            )
            self.out = made.enter_context(closing(StoreScratch(device, out, direct_bytes)))
            self._made = made.pop_all()

    def close(self) -> None:
        """Free all of it; no stream uses it any more."""
        self._made.close()


class DirectionScratch:
    """What one direction has of it: a `side` of the memory at `address`, `work_bytes` a batch.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(
        self, rings: RingPair, side: Side, address: int, part_bytes: int, work_bytes: int
    ) -> None:
        self._rings = rings
        self._side = side
        self._address = address
        self.bytes_together = min(part_bytes, BYTES_TOGETHER)
        with ExitStack() as made:
            self._free = [
                made.enter_context(closing(Scratch(work_bytes))) for _ in range(BATCHES_UNDER_WAY)
            ]
            self._made = made.pop_all()

    def fits(
        self, batch: Sequence[StoreJob] | Sequence[RestoreJob], job: StoreJob | RestoreJob
    ) -> bool:
        """Tell whether the job may be done together with those of `batch`."""
        nbytes = job.nbytes + sum(one.nbytes for one in batch)
        return len(batch) < PARTS_TOGETHER and nbytes <= self.bytes_together

    def has_for(self, job: StoreJob | RestoreJob) -> bool:
        """Tell whether there is scratch for a batch that begins with the job."""
        is_alone = job.nbytes >= self.bytes_together  # nothing fits beside it
        nbytes = _room_of(job) if is_alone else _room_for(self.bytes_together)
        return self._rings.has(self._side, nbytes)

    def place_beside(self, waiting: object) -> int | None:  # noqa: ARG002 - none is like that
        """Return None: every job waits for room."""
        return None

    def take(self, batch: Sequence[StoreJob] | Sequence[RestoreJob]) -> Scratch:
        """Return scratch for a batch; `has_for` has said that there is some."""
        scratch = self._free.pop()
        sizes = [_room_of(job) for job in batch]
        scratch.taken = self._rings.take(self._side, sum(sizes))
        scratch.rooms = []
        address = self._address + scratch.taken.start
        for size in sizes:
            scratch.rooms.append(address)
            address += size
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        """Take scratch back: no stream uses it any more."""
        self._rings.give_back(self._side, scratch.taken)
        self._free.append(scratch)

    def close(self) -> None:
        """Free all of it; no stream uses it any more."""
        self._made.close()


class StoreScratch:
    """What stores have: room in the ring, or a record alone for what is copied as it is.

    Under MPS alone: there the encoders wait for whole kernels of the trainer, and copies for none.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, device: CudaDevice, ring: DirectionScratch, direct_bytes: int) -> None:
        self._device = device
        self._ring = ring
        self._direct_bytes = max(direct_bytes, ring.bytes_together + 1)  # each a batch by itself
        may_be_direct = direct_bytes > 0 and device.is_shared_by_mps
        with ExitStack() as made:
            self._free = [
                made.enter_context(closing(DirectScratch()))
                for _ in range(DIRECT_UNDER_WAY if may_be_direct else 0)
            ]
            self._made = made.pop_all()
        self._goes_direct: StoreJob | None = None
        """For which `has_for` has found no room but another way."""
        self._encoding: list[Transit] = []
        self._blobs: list[Transit] = []
        self._copies: list[DirectScratch] = []
        """Direct ones on the link, as far as they have been looked at."""
        self._since = 0.0
        """When the oldest encoder that is queued became that."""

    def fits(self, batch: Sequence[StoreJob], job: StoreJob) -> bool:
        """Tell whether the job may be done together with those of `batch`."""
        return self._ring.fits(batch, job)

    def has_for(self, job: StoreJob) -> bool:
        """Tell whether there is scratch for a batch that begins with the job."""
        self._goes_direct = None
        may_be_direct = self._may_be_direct(job)
        # Who is told of room must take it: the other direction is kept from it until then.
        if not (may_be_direct and job.part.codec == "raw") and self._ring.has_for(job):
            return True
        return may_be_direct and self._has_direct_for(job)

    def place_beside(self, waiting: Iterable[tuple[int, StoreJob]]) -> int | None:
        """Return the place of the first large chunk, if it goes as it is now: it needs no room."""
        for place, job in waiting:
            if self._may_be_direct(job):
                return place if self._has_direct_for(job) else None
        return None

    def take(self, batch: Sequence[StoreJob]) -> Scratch | DirectScratch:
        """Return scratch for a batch; `has_for` has said that there is some."""
        if batch[0] is self._goes_direct:
            direct = self._free.pop()
            self._copies.append(direct)
            return direct
        scratch = self._ring.take(batch)
        if not self._encoding:
            self._since = monotonic()
        self._encoding.append(scratch)
        return scratch

    def encoded(self, scratch: Scratch) -> None:
        """Note that a batch's blobs are there: the next encoder has its turn."""
        self._encoding.remove(scratch)
        self._blobs.append(scratch)
        self._since = monotonic()

    def give_back(self, scratch: Scratch | DirectScratch) -> None:
        """Take scratch back: no stream uses it any more."""
        if isinstance(scratch, DirectScratch):
            self._copies = [copy for copy in self._copies if copy is not scratch]
            self._free.append(scratch)
            return
        for under_way in (self._encoding, self._blobs):
            if scratch in under_way:
                under_way.remove(scratch)
        self._ring.give_back(scratch)

    def close(self) -> None:
        """Free the records; no stream uses them any more."""
        self._made.close()

    def _may_be_direct(self, job: StoreJob) -> bool:
        return bool(self._free) and job.nbytes >= self._direct_bytes

    def _has_direct_for(self, job: StoreJob) -> bool:
        self._goes_direct = job if goes_direct(job.part.codec, self._outlook()) else None
        return self._goes_direct is not None

    def _outlook(self) -> Outlook:
        self._copies = [scratch for scratch in self._copies if scratch.is_on_link]
        return Outlook(
            encoders_wait=monotonic() - self._since if self._encoding else 0.0,
            blobs=len(self._blobs),
            copies=len(self._copies),
            link_is_idle=self._device.sends_nothing(),
        )


def session_parts(device: CudaDevice) -> int:
    """Return the room that a session takes on a device, in its largest chunks."""
    return 2 + _shared_parts(device)


def _event() -> Event:
    return Event(timed=True, awaited=False)


def _shared_parts(device: CudaDevice) -> int:
    return SHARED_PARTS if device.is_shared_by_mps else SHARED_PARTS_IN_TURNS


def _room_of(job: StoreJob | RestoreJob) -> int:
    """Return the bytes of its blob: at the most, as long as nobody knows its size."""
    known = job.block.nbytes if isinstance(job, RestoreJob) else blob_bound(job.nbytes)
    return granules(known)


def _room_for(nbytes: int) -> int:
    """Return the bytes that blobs of `nbytes`, of however many chunks of a batch, take at most."""
    return granules(nbytes) + PARTS_TOGETHER * (blob_bound(0) + GRANULE)
