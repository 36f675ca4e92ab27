"""Device memory in which blobs lie while they are coded and copied, shared by both directions.

A batch has room for its blobs, apart from all others', and a part as large as the session's parts
may be finds room at the latest when nothing of its direction is under way.

Room is shared by bytes, not by batches: large parts, which cost the trainer the fewest
interruptions for their bytes, and many small ones need the same few hundred MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Final

from storm_kernels.ancf.cuda_launches import BlobKind
from storm_kernels.cuda_driver import DeviceBuffer, Event, MappedHost, elapsed_seconds

from stormd.arena import GRANULE, Block, granules
from stormd.events import RestoreJob, StoreJob
from stormd.lanes.cuda.device import CudaDevice
from stormd.lanes.cuda.ring import RingPair, Side
from stormd.parts import blob_bound

__all__ = [
    "RESULT_WORDS",
    "DirectionScratch",
    "Scratch",
    "SessionScratch",
    "session_parts",
]

SHARED_PARTS: Final = 2
"""For so many of the largest parts there is room that either direction may have."""

SHARED_PARTS_IN_TURNS: Final = 4
"""The same where the daemon and a trainer take turns, which cost less for their bytes if long."""

BATCHES_UNDER_WAY: Final = 16
"""In a direction, however small they are."""

PARTS_TOGETHER: Final = 8
"""Small parts that may make up a batch."""

BYTES_TOGETHER: Final = 8 << 20
"""Of parts that are done together: what they share costs little then, and the first of them waits
for the last no longer than 0.2 ms."""

RESULT_WORDS: Final = 8
"""Words of mapped host memory for each: the codec leaves a blob's size, status and mode there."""


class Scratch:
    """What one batch needs on its way: events, and memory for what the codec says and sorts.

    `rooms` are the device addresses of its blobs. On the way out, `placed` is where they go that
    are being copied to the pool; on the way back, `kinds` is what they are, and `is_coding` whether
    the decoders are on their stream.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, work_bytes: int) -> None:
        with ExitStack() as made:
            self.work = made.enter_context(closing(DeviceBuffer(work_bytes)))
            result_bytes = 8 * RESULT_WORDS * PARTS_TOGETHER
            self.result = made.enter_context(closing(MappedHost(result_bytes)))
            # Nobody sleeps until they are passed: see Pipeline.
            self.code_began, self.coded, self.copy_began, self.copied = (
                made.enter_context(closing(Event(timed=True, awaited=False))) for _ in range(4)
            )
            self._made = made.pop_all()
        self.words = self.result.words()
        self.taken = range(0)
        """Of the ring, by bytes."""
        self.rooms: list[int] = []
        self.placed: list[Block] = []
        self.kinds: list[BlobKind] = []
        self.is_coding = False

    def coding_seconds(self) -> float:
        """Return how long the device coded; that is over."""
        return elapsed_seconds(self.code_began, self.coded)

    def copying_seconds(self) -> float:
        """Return how long the device copied; that is over."""
        return elapsed_seconds(self.copy_began, self.copied)

    def close(self) -> None:
        """Free all of it; no stream uses it any more."""
        self._made.close()


class SessionScratch:
    """The scratch of a session whose parts are of up to `part_bytes`: one memory, two directions.

    A forward pass stores and a backward pass restores. So each has room for a part of its own, and
    whoever needs more has the room that is shared, too, while the other has nothing there. What a
    restore has taken may wait for its client, which may wait for a store.

    Taking turns with a trainer costs both sides more than coding a part. So where there is no MPS,
    batches are begun again only when half of a direction's room is free.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, device: CudaDevice, part_bytes: int) -> None:
        rings = RingPair(
            _room_for(part_bytes),
            _shared_parts(device) * _room_for(part_bytes),
            BATCHES_UNDER_WAY,
            by_halves=not device.is_shared_by_mps,
        )
        work_bytes = device.codec.scratch_bytes(part_bytes)
        with ExitStack() as made:
            memory = made.enter_context(closing(DeviceBuffer(rings.nbytes)))
            self.out, self.back = (
                made.enter_context(
                    closing(DirectionScratch(rings, side, memory.address, part_bytes, work_bytes))
                )
                for side in (Side.LOW, Side.HIGH)
            )
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
        self._bytes_together = min(part_bytes, BYTES_TOGETHER)
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
        return len(batch) < PARTS_TOGETHER and nbytes <= self._bytes_together

    def has_for(self, job: StoreJob | RestoreJob) -> bool:
        """Tell whether there is scratch for a batch that begins with the job."""
        is_alone = job.nbytes >= self._bytes_together  # nothing fits beside it
        nbytes = _room_of(job) if is_alone else _room_for(self._bytes_together)
        return self._rings.has(self._side, nbytes)

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


def session_parts(device: CudaDevice) -> int:
    """Return the room that a session takes on a device, in its largest parts."""
    return 2 + _shared_parts(device)


def _shared_parts(device: CudaDevice) -> int:
    return SHARED_PARTS if device.is_shared_by_mps else SHARED_PARTS_IN_TURNS


def _room_of(job: StoreJob | RestoreJob) -> int:
    """Return the bytes of its blob: at the most, as long as nobody knows its size."""
    known = job.block.nbytes if isinstance(job, RestoreJob) else blob_bound(job.nbytes)
    return granules(known)


def _room_for(nbytes: int) -> int:
    """Return the bytes that blobs of `nbytes`, of however many parts of a batch, take at most."""
    return granules(nbytes) + PARTS_TOGETHER * (blob_bound(0) + GRANULE)
