"""The data paths of the daemon, one module a kind of device, and the contract they keep.

What stays true: a lane does what the ledger has admitted and decides nothing itself. Each job
that was handed over is answered by exactly one result, whatever happens, and a session's memory
is untouched from its `Detached` on. Results reach the event loop through the lane's mailbox.

Encode and decode are steps from an address to an address: of host memory on the cpu lane, of
device memory on a stream on the cuda lane. Ranges in jobs lie inside their segment: that was
checked before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from storm_kernels import ancf
from storm_kernels.ancf import DType

from stormd.arena import Block, Space
from stormd.health import Heart
from stormd.link_meter import LinkMeter
from stormd.protocol import Hello, MapSegment

__all__ = [
    "Attachment",
    "Detached",
    "Lane",
    "Post",
    "RestoreDone",
    "RestoreFailed",
    "RestoreJob",
    "Result",
    "SegmentMapped",
    "SegmentRefused",
    "StoreDone",
    "StoreFailed",
    "StoreJob",
    "blob_bound",
    "parse_dtype",
]


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a lane has set up for a session.

    `descriptors` go to the client, timeline page first; the caller closes them. `staging_bytes`
    is the staging area's size as granted, `part_bytes` the largest entry. `segment_bytes` is the
    size of segment 0 where it is the staging area and exists already, 0 where the client maps it.
    """

    descriptors: tuple[int, ...]
    staging_bytes: int
    part_bytes: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Encode `nbytes` at `offset` of `segment`; place the blob on `space`'s promise of `promised`.

    `sequence` is the value of the session's `published` counter to wait for (cuda lane). With a
    `result` other than 0 the client has encoded them: the blob is there, as long as that result
    in the timeline page says.
    """

    session: int
    entry: int
    segment: int
    offset: int
    nbytes: int
    dtype: DType
    codec: str
    sequence: int
    promised: int
    space: Space
    result: int = 0


@dataclass(frozen=True, slots=True)
class RestoreJob:
    """Decode the blob in `block` to `nbytes` at `offset` of `segment`."""

    session: int
    ticket: int
    entry: int
    block: Block
    segment: int
    offset: int
    nbytes: int
    sequence: int


@dataclass(frozen=True, slots=True)
class StoreDone:
    """The blob is in the arena at `block`; `seconds` of work on it, waiting left out."""

    session: int
    entry: int
    block: Block
    mode: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """There is no blob, and nothing is placed: the promise still stands, to be withdrawn."""

    session: int
    entry: int
    detail: str


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """The destination holds the verified bytes."""

    session: int
    ticket: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The destination may hold anything; `kind` is "CorruptBlob" or "ActivationLost"."""

    session: int
    ticket: int
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class SegmentMapped:
    """Jobs may name the segment from now on."""

    session: int
    segment: int


@dataclass(frozen=True, slots=True)
class SegmentRefused:
    """The segment was not mapped."""

    session: int
    segment: int
    detail: str


@dataclass(frozen=True, slots=True)
class Detached:
    """The last result of a session: all its jobs have been answered, its memory is let go."""

    session: int


Result = (
    StoreDone
    | StoreFailed
    | RestoreDone
    | RestoreFailed
    | SegmentMapped
    | SegmentRefused
    | Detached
)


Post = Callable[[*tuple[Result, ...]], None]
"""Takes results, several at once where they arise together; from any thread."""


class Lane(Protocol):
    """One device's data path. All methods are called on the event loop and never block it."""

    @property
    def device(self) -> str:
        """A name of protocol.DEVICES."""

    @property
    def hearts(self) -> tuple[Heart, ...]:
        """The signs of life of the workers there are now.

        A worker is inside its heart only while it does what must end by itself, never while it
        waits for a client.
        """

    @property
    def links(self) -> tuple[LinkMeter, ...]:
        """What is known of the links to its devices, one a device; none where there is no link."""

    def attach(self, session: int, hello: Hello) -> Attachment:
        """Set a session's shared memory up.

        Raises:
            LaneUnavailable: this session cannot be served; nothing of it is left.
        """

    def store(self, job: StoreJob) -> None:
        """Begin a store; answered by StoreDone or StoreFailed."""

    def skip(self, session: int, sequence: int) -> None:
        """Note that the store of this sequence number was rejected. No answer.

        Called in the order of the session's stores: a lane that counts them on the session's
        timeline passes it over, so that nobody waits for it.
        """

    def restore(self, job: RestoreJob) -> None:
        """Begin a restore; answered by RestoreDone or RestoreFailed."""

    def map_segment(self, session: int, request: MapSegment) -> None:
        """Begin to map a segment; answered by SegmentMapped or SegmentRefused."""

    def unmap_segment(self, session: int, segment: int) -> None:
        """Unmap the segment once no job under way uses it. No answer."""

    def detach(self, session: int) -> None:
        """Skip the session's waiting jobs, finish what runs, let its memory go; then Detached."""

    def close(self, seconds: float) -> bool:
        """End the workers; False where one still runs after `seconds`. Sessions are detached."""


def parse_dtype(name: str, nbytes: int) -> DType:
    """Return the element type of that name.

    Raises:
        ValueError: no such type, or `nbytes` is no whole number of its elements.
    """
    dtype = DType.__members__.get(name.upper())
    if dtype is None:
        known = ", ".join(member.name.lower() for member in DType)
        raise ValueError(f"dtype {name!r:.60} is unknown: send one of {known}")
    if nbytes % dtype.element_bytes:
        raise ValueError(
            f"{nbytes} bytes are no whole number of {name} elements of {dtype.element_bytes}"
        )
    return dtype


def blob_bound(nbytes: int) -> int:
    """Return the most bytes that a blob of `nbytes` takes; in mode raw, exactly what it takes."""
    return ancf.max_encoded_bytes(nbytes, DType.BYTES)  # the same for all element types
