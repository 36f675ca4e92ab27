"""The data passed between the ledger, the gateway and the lanes: jobs, results, instructions.

All of it is plain data with named fields, made by keyword, since ten positional numbers would hide
a swapped pair. If carrying out an instruction fails, a later event tells the ledger. No object is
changed once it is made. Those made for each chunk are not frozen, because frozen ones take three
times as long to make. For the same reason the ledger makes jobs by position, in one place each: by
keyword it takes twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from stormd.ledger.chunks import Chunk
from stormd.memory.arena import Block, Space
from stormd.protocol import MapPiece, MapSegment, Message, ReserveRange

__all__ = [
    "Detach",
    "Detached",
    "Ended",
    "Instruction",
    "Jobs",
    "Map",
    "Mappable",
    "Probe",
    "Recorded",
    "Reply",
    "RestoreDone",
    "RestoreFailed",
    "RestoreJob",
    "Result",
    "SegmentMapped",
    "SegmentRefused",
    "Skip",
    "SpillDone",
    "SpillFailed",
    "SpillJob",
    "StoreDone",
    "StoreFailed",
    "StoreJob",
    "Unmap",
    "Wait",
]

MAX_DETAIL: Final = 1000
"""Maximum characters of the text with which a job fails: it is sent to the client."""

# --- jobs for lanes -------------------------------------------------------------------------


Mappable: TypeAlias = MapSegment | ReserveRange | MapPiece
"""The messages that offer memory to the session's lane for mapping."""


@dataclass(slots=True)
class StoreJob:
    """Encode the bytes of `chunk` at `offset` of `segment`, and `place` the blob in `space`.

    The lane waits until the session's `published` counter reaches `sequence`. Once the source may
    be used again, it raises the `stored` counter to that number (cuda lane).
    """

    session: int
    entry: int
    chunk: Chunk
    segment: int
    offset: int
    sequence: int
    space: Space

    @property
    def nbytes(self) -> int:
        """Number of bytes to be encoded."""
        return self.chunk.nbytes

    def place(self, nbytes: int) -> Block:
        """Turn the promise into a block for the blob of `nbytes`, and return the block."""
        return self.space.place(self.chunk.charge, nbytes)

    def unplace(self, block: Block) -> None:
        """Undo `place`: the promise is valid again."""
        self.space.unplace(block, self.chunk.charge)

    def failed(self, _kind: str, detail: str, sequence: int = 0) -> StoreFailed:
        """Return the result of a store that came to nothing."""
        return StoreFailed(
            session=self.session, entry=self.entry, detail=detail[:MAX_DETAIL], sequence=sequence
        )


@dataclass(slots=True)
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

    def failed(self, kind: str, detail: str) -> RestoreFailed:
        """Return the result of a restore that came to nothing; `kind` is as in RestoreFailed."""
        return RestoreFailed(
            session=self.session, ticket=self.ticket, kind=kind, detail=detail[:MAX_DETAIL]
        )


# --- jobs for the tier on disk --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillJob:
    """Read an entry's blob from `extent` into `block`, or write it from there to `extent`.

    Neither is freed before the answer. Each written blob gets a new `generation`; it must be read
    under the same one.
    """

    session: int
    entry: int
    generation: int
    block: Block
    extent: Block
    is_read: bool


# --- results of lanes and the tier, one for each job -----------------------------------------


@dataclass(slots=True, kw_only=True)
class StoreDone:
    """The blob is in the pool at `block`; the work took `seconds`, without waiting.

    `sequence` is the store's if its lane must hear when the result is recorded, else 0.
    """

    session: int
    entry: int
    block: Block
    mode: str
    seconds: float
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed:
    """There is no blob and no block. The promise still stands and must be withdrawn."""

    session: int
    entry: int
    detail: str
    sequence: int = 0


@dataclass(slots=True, kw_only=True)
class RestoreDone:
    """The destination holds the verified bytes."""

    session: int
    ticket: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed:
    """The destination is undefined; `kind` is "CorruptBlob" or "ActivationLost"."""

    session: int
    ticket: int
    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMapped:
    """Jobs may name the segment from now on."""

    session: int
    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRefused:
    """The segment was not mapped."""

    session: int
    segment: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillDone:
    """The blob has been written to the disk, or read into its block and verified."""

    session: int
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillFailed:
    """The tier is of no further use; a block that was being read into is undefined."""

    session: int
    entry: int
    detail: str


@dataclass(frozen=True, slots=True)
class Detached:
    """A session's last result: all its jobs are answered, and the lane has released its memory."""

    session: int


Result = (
    SpillDone
    | SpillFailed
    | StoreDone
    | StoreFailed
    | RestoreDone
    | RestoreFailed
    | SegmentMapped
    | SegmentRefused
    | Detached
)


# --- other instructions of the ledger -------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Reply:
    """Send the message to the session's client; `request` is 0 if it answers no request."""

    session: int
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Jobs:
    """Have the session's lane begin these jobs, at least one, in their order."""

    session: int
    jobs: list[StoreJob | RestoreJob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Tell the session's lane that no job will follow for this sequence number."""

    session: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Tell the session's lane that the results of the stores with these numbers are recorded."""

    session: int
    sequences: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """Have the session's lane map the segment; a piece's descriptor has arrived before."""

    session: int
    segment: Mappable


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmap:
    """Have the session's lane unmap the segment once nothing uses it."""

    session: int
    segment: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Repeat the request once the pool has grown, before handling the session's later requests.

    This is the only instruction of its answer. Nothing has changed, except that the space has noted
    that more memory is wanted.
    """

    session: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Check whether a silent session's client can still be reached; if not, end the session."""

    session: int


@dataclass(frozen=True, slots=True)
class Detach:
    """Have the session's lane detach the session; its client gets no more answers."""

    session: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is gone and holds nothing: close its lifeline. `cause` is in counters.ENDINGS."""

    session: int
    cause: str


Instruction = Reply | Jobs | Skip | Recorded | Map | Unmap | Wait | Probe | Detach | Ended
