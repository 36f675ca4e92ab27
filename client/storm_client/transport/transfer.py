"""What is in flight: one chunk, and all of one stored range that go the same way.

A **transfer** is one chunk in flight. Its number is that of the request that asked for it. The
transfers of one stored range in flight out are an `Outgoing`, those in flight back an `Incoming`.
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
    """How far a transfer has come."""

    __hash__ = object.__hash__  # that of Enum is written in Python
    SENT = auto()
    """Out: the daemon has been asked to take the chunk."""
    ADMITTED = auto()
    """Out: it has promised room."""
    STORED = auto()
    """Out: the bytes are in its arena. Final."""
    REFUSED = auto()
    """Out: it does not take the chunk. Final."""
    REQUESTED = auto()
    """Back: it may be writing the chunk."""
    DROPPED = auto()
    """Back: the same, but nobody wants the chunk any more."""
    HANDED_OUT = auto()
    """Back: the same, and the memory is in use: streams wait until the chunk has been written."""
    ARRIVED = auto()
    """Back: the bytes are there."""
    DONE = auto()
    """Back: the bytes were used, or given up. Final."""
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
    """One chunk, in flight out or back."""

    number: int
    nbytes: int
    route: Route
    slot: Slot | None
    """The range of the staging area that it occupies, until that is given back."""
    of: Outgoing | Incoming
    phase: Phase
    index: int = 0
    """On its way back: the part's place among those of its record."""
    used_by: int = 0
    """The backward pass that uses it since before it was answered for."""
    error: StormError | None = None
    message: Message | None = None
    """What has asked the daemon for it; None for one that was never asked for."""

    @property
    def is_wanted(self) -> bool:
        """On its way back: whether its bytes are there, or will be, or cannot be had."""
        return self.phase is Phase.REQUESTED or self.phase in ANSWERED

    def move_to(self, phase: Phase) -> None:
        """Go on to the next phase, or stay in this one."""
        assert phase is self.phase or phase in _NEXT[self.phase], f"{self.phase} to {phase}"
        self.phase = phase


@dataclass(eq=False, slots=True)
class Outgoing:
    """A stored range's way out; it outlives the range for the statistics' sake."""

    key: int
    nbytes: int
    dtype: torch.dtype
    codec: str
    count: int
    """Of its chunks."""
    record: weakref.ref[StoredRange] | None = None
    """None for what is put into the cache."""
    stats: RangeRecorder | None = None
    refusal: tuple[str, str] | None = None
    """The reason, and the daemon's sentence about it; then nothing of it is with the daemon."""
    error: StormError | None = None
    """Why a chunk that was admitted is lost."""
    admitted: set[int] = field(default_factory=set)
    arrived: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Of each chunk that is in the arena, its bytes there and the codec's mode."""
    is_counted: bool = False

    # Where the daemon reads the source in its own memory:
    ready: int = 0
    """The number that says its bytes are there, where one does so before those of its chunks."""
    sequence: int | None = None
    """The number of its last chunk; None until its chunks are sent."""

    @property
    def is_answered(self) -> bool:
        """Whether the daemon has taken or refused it."""
        return self.refusal is not None or len(self.admitted) == self.count

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come of it."""
        ended = self.refusal is not None or self.error is not None
        return ended or len(self.arrived) == self.count

    def living(self) -> StoredRange | None:
        """Return the stored range if somebody still holds it."""
        return None if self.record is None else self.record()


@dataclass(eq=False, slots=True)
class Incoming:
    """A stored range's way back: to the staging area, or into `storage`, which the daemon maps."""

    key: int
    parts: list[Part]
    storage: torch.UntypedStorage | None = None
    transfers: dict[int, Transfer] = field(default_factory=dict)
    """By the chunk's place in `parts`."""
    is_demanded: bool = False
    """Whether a thread waits for it; what nobody waits for is prefetched, or kept."""
    nbytes: int = field(init=False)
    """Of its storage, 0 without one."""

    def __post_init__(self) -> None:
        self.nbytes = 0 if self.storage is None else self.storage.nbytes()
