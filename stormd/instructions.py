"""What the ledger tells its shell to do, besides starting the jobs of `lanes`.

What stays true: an instruction is plain data, and carrying it out cannot fail in a way that the
ledger would not be told of by a later event.
"""

from __future__ import annotations

from dataclasses import dataclass

from stormd.lanes import RestoreJob, StoreJob
from stormd.protocol import MapSegment, Message

__all__ = ["Detach", "Ended", "Instruction", "Map", "Probe", "Reply", "Skip", "Unmap"]


@dataclass(frozen=True, slots=True)
class Reply:
    """Send the message to the session's client; `request` is 0 where it answers none."""

    session: int
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Skip:
    """Tell the session's lane that no job will follow for this sequence number."""

    session: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Map:
    """Have the session's lane map the segment."""

    session: int
    segment: MapSegment


@dataclass(frozen=True, slots=True)
class Unmap:
    """Have the session's lane unmap the segment once nothing uses it."""

    session: int
    segment: int


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
    """The session is gone and holds nothing: close its lifeline."""

    session: int


Instruction = Reply | StoreJob | RestoreJob | Skip | Map | Unmap | Probe | Detach | Ended
