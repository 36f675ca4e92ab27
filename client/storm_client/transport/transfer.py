"""What is in flight: a chunk, and all chunks of a stored range in the same direction.

A **transfer** is one chunk in flight. Its number is that of the request that asked for it. The
transfers of one stored range to the daemon are an `Outgoing`, those back from it an `Incoming`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from storm_client.errors import StormError
from storm_client.lanes import Route, Slot
from storm_client.monitoring.shared_counts import RangeRecorder
from storm_client.saved.ranges import Part, StoredRange
from stormd.protocol import Message

__all__ = ["ANSWERED", "PENDING", "Incoming", "Outgoing", "Phase", "Transfer"]


class Phase(Enum):
    """The state of a transfer."""

    __hash__ = object.__hash__  # Enum's own is written in Python
    SENT = auto()
    """Store: the daemon has been asked to take the chunk."""
    ADMITTED = auto()
    """Store: the daemon has promised room."""
    STORED = auto()
    """Store: the bytes are in the daemon's arena. Final."""
    REFUSED = auto()
    """Store: the daemon does not take the chunk. Final."""
    REQUESTED = auto()
    """Restore: the daemon may be writing the chunk."""
    DROPPED = auto()
    """Restore: the same, but nobody wants the chunk any more."""
    HANDED_OUT = auto()
    """Restore: the same, and the memory is in use: streams wait for the chunk's bytes."""
    ARRIVED = auto()
    """Restore: the bytes are there."""
    DONE = auto()
    """Restore: the bytes were used, or given up. Final."""
    FAILED = auto()
    """The daemon has lost the chunk, or cannot restore it: `error` says why. Final."""


_NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.SENT: (Phase.ADMITTED, Phase.STORED, Phase.REFUSED, Phase.FAILED),
    Phase.ADMITTED: (Phase.STORED, Phase.REFUSED, Phase.FAILED),
    Phase.STORED: (),
    Phase.REFUSED: (),
    Phase.REQUESTED: (Phase.ARRIVED, Phase.FAILED, Phase.DROPPED, Phase.HANDED_OUT),
    Phase.DROPPED: (Phase.DONE,),
    Phase.HANDED_OUT: (Phase.DONE, Phase.FAILED, Phase.DROPPED),
    Phase.ARRIVED: (Phase.DONE,),
    Phase.DONE: (),
    Phase.FAILED: (Phase.DONE,),
}
PENDING = (Phase.SENT, Phase.ADMITTED, Phase.REQUESTED, Phase.DROPPED, Phase.HANDED_OUT)
ANSWERED = (Phase.ARRIVED, Phase.FAILED)


@dataclass(eq=False, slots=True)
class Transfer:
    """One chunk in flight, to the daemon or back."""

    number: int
    nbytes: int
    route: Route
    slot: Slot | None
    """The slot of the staging area that it occupies, until the slot is freed."""
    of: Outgoing | Incoming
    phase: Phase
    index: int = 0
    """For a restore: the chunk's place among its record's chunks."""
    used_by: int = 0
    """The backward pass that uses the chunk since before the daemon answered."""
    error: StormError | None = None
    message: Message | None = None
    """The request to the daemon; None if nothing was requested."""

    @property
    def is_wanted(self) -> bool:
        """For a restore: whether the chunk is requested, has arrived or has failed."""
        return self.phase is Phase.REQUESTED or self.phase in ANSWERED

    def move_to(self, phase: Phase) -> None:
        """Change to the next phase, or keep the present one."""
        assert phase is self.phase or phase in _NEXT[self.phase], f"{self.phase} to {phase}"
        self.phase = phase


@dataclass(eq=False, slots=True)
class Outgoing:
    """The store of one stored range; it outlives the range for the statistics."""

    key: int
    nbytes: int
    dtype: torch.dtype
    codec: str
    count: int
    """The number of its chunks."""
    record: weakref.ref[StoredRange] | None = None
    """None for a tensor that is put into the cache."""
    stats: RangeRecorder | None = None
    refusal: tuple[str, str] | None = None
    """The reason and the daemon's explanation; then the daemon holds none of the range."""
    error: StormError | None = None
    """Why an admitted chunk is lost."""
    admitted: set[int] = field(default_factory=set)
    arrived: dict[int, tuple[int, str]] = field(default_factory=dict)
    """For each chunk in the arena: its bytes there and the codec's mode."""
    is_counted: bool = False

    # If the daemon reads the source in its own memory:
    sequence: int | None = None
    """The number of its last chunk; None until its chunks are sent."""

    @property
    def is_answered(self) -> bool:
        """Whether the daemon has admitted or refused the range."""
        return self.refusal is not None or len(self.admitted) == self.count

    @property
    def is_over(self) -> bool:
        """Whether no more answers are to be expected."""
        ended = self.refusal is not None or self.error is not None
        return ended or len(self.arrived) == self.count

    def living(self) -> StoredRange | None:
        """Return the stored range if it is still alive."""
        return None if self.record is None else self.record()


@dataclass(eq=False, slots=True)
class Incoming:
    """The restore of a stored range: into the staging area, or into `storage`, mapped memory."""

    key: int
    parts: list[Part]
    storage: torch.UntypedStorage | None = None
    transfers: dict[int, Transfer] = field(default_factory=dict)
    """By the chunk's place in `parts`."""
    is_demanded: bool = False
    """Whether a thread waits for it; otherwise it was prefetched or kept."""
    nbytes: int = field(init=False)
    """Bytes of `storage`, 0 without one."""

    def __post_init__(self) -> None:
        self.nbytes = 0 if self.storage is None else self.storage.nbytes()
