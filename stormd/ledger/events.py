"""What passes between the ledger, the gateway and the lanes: jobs, results, instructions.

All of it is plain data with named fields, made by keyword: a record of ten numbers in a row hides a
swapped pair. Carrying an instruction out cannot fail in a way that the ledger would not be told of
by a later event. None is changed once it is made; those that a part has one of each are not frozen,
which would take three times as long to make, and the ledger makes jobs by position, in one place
each: by keyword it takes twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stormd.ledger.parts import Part
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
    "ReadJob",
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
    "WriteJob",
]

# --- jobs for lanes -------------------------------------------------------------------------


Mappable: TypeAlias = MapSegment | ReserveRange | MapPiece
"""What a client offers to its session's lane."""


@dataclass(slots=True)
class StoreJob:
    """Encode the bytes of `part` at `offset` of `segment`, and `place` the blob in `space`.

    `ready` is the value of the session's `published` counter to wait for, `sequence` the one that
    its `stored` is raised to then (cuda lane).
    """

    session: int
    entry: int
    part: Part
    segment: int
    offset: int
    ready: int
    sequence: int
    space: Space

    @property
    def nbytes(self) -> int:
        """Of the bytes to be encoded."""
        return self.part.nbytes

    def place(self, nbytes: int) -> Block:
        """Return where its blob of `nbytes` goes; the promise to it is used up by that."""
        return self.space.place(self.part.charge, nbytes)

    def unplace(self, block: Block) -> None:
        """Undo `place`: the promise stands again."""
        self.space.unplace(block, self.part.charge)


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


# --- jobs for the tier on disk --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillJob:
    """Move the blob of an entry between `block` and `extent`, which stay as they are until then.

    `generation` is another one for each blob that is written; it is read under the same.
    """

    session: int
    entry: int
    generation: int
    block: Block
    extent: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob(SpillJob):
    """From the pool to the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJob(SpillJob):
    """From the disk to the pool."""


# --- what lanes and the tier answer, one result a job ----------------------------------------


@dataclass(slots=True, kw_only=True)
class StoreDone:
    """The blob is in the arena at `block`; `seconds` of work on it, waiting left out.

    `sequence` is the store's where its lane wants to hear when that is written down, else 0.
    """

    session: int
    entry: int
    block: Block
    mode: str
    seconds: float
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed:
    """There is no blob, and nothing is placed: the promise still stands, to be withdrawn."""

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
    """The destination may hold anything; `kind` is "CorruptBlob" or "ActivationLost"."""

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
    """What was to be written is on the disk, or what was to be read is in the block, verified."""

    session: int
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillFailed:
    """The tier is of no use any more; what was to be read into may hold anything."""

    session: int
    entry: int
    detail: str


@dataclass(frozen=True, slots=True)
class Detached:
    """The last result of a session: all its jobs have been answered, its memory is let go."""

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


# --- what else the ledger has done ----------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Reply:
    """Send the message to the session's client; `request` is 0 where it answers none."""

    session: int
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Jobs:
    """Have the session's lane begin these, of which there is at least one, in their order."""

    session: int
    jobs: list[StoreJob | RestoreJob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Tell the session's lane that no job will follow for this sequence number."""

    session: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Tell the session's lane that what came of the stores of these numbers is written down."""

    session: int
    sequences: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """Have the session's lane map the segment; the descriptor of a piece is there by then."""

    session: int
    segment: Mappable


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmap:
    """Have the session's lane unmap the segment once nothing uses it."""

    session: int
    segment: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask the ledger for the same again once the pool has grown, before what the session says next.

    It stands alone. Nothing was changed, but that the space knows that more memory is wanted.
    """

    session: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether the silent session's client can still be reached; end it if not."""

    session: int


@dataclass(frozen=True, slots=True)
class Detach:
    """Have the session's lane let go of the session; its client is not answered any more."""

    session: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is gone and holds nothing: close its lifeline. `cause` is of counters.ENDINGS."""

    session: int
    cause: str


Instruction = Reply | Jobs | Skip | Recorded | Map | Unmap | Wait | Probe | Detach | Ended
