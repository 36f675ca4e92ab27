"""What moves bytes between tensors and the daemon: a lane, one module a kind of device.

A lane owns the staging area that it shares with the daemon, and it knows what orders its copies:
the host's program order on the cpu lane, streams and the timeline page on the cuda lane. There it
has the device itself wait until whoever used a slot before is done with it. What is stored when,
and who waits for which message, is decided elsewhere.

A **route** says how one chunk travels: `Staged`, by a copy in the staging area; `Mapped`, in
memory of this process that the daemon has mapped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import torch

from stormd.protocol import MapSegment, Message, Welcome

if TYPE_CHECKING:
    from storm_client.lanes.offers import Mappable
    from storm_client.lanes.segments import Segments

__all__ = [
    "NOTHING",
    "STAGING",
    "InPlace",
    "Lane",
    "LaneHello",
    "Mapped",
    "Request",
    "Route",
    "Slot",
    "Staged",
    "Stream",
]

NOTHING = nullcontext()

STAGING = 0
"""The segment that is the staging area."""

Stream: TypeAlias = torch.Stream | None
"""Of a device that works asynchronously: None for its default stream, or where it has none."""

Request = Callable[[Message], Message]
"""Sends a message to the daemon and returns its answer; raises a StormError when refused."""


@dataclass(frozen=True, slots=True)
class LaneHello:
    """What Hello says about a lane; the fields mean what they mean there."""

    device: str
    device_uuid: str = ""
    staging_bytes: int = 0
    features: tuple[str, ...] = ()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """A range of the staging area for one chunk alone; whoever holds this owns the range."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Staged:
    """By a copy in the staging area, which holds the bytes themselves."""

    offset: int
    segment: ClassVar[int] = STAGING


@dataclass(frozen=True, slots=True)
class Mapped:
    """In the tensor's own memory, where the daemon has mapped it."""

    segment: int
    offset: int


Route: TypeAlias = Staged | Mapped
"""How a chunk's bytes go; decided once for each transfer."""


class InPlace(Protocol):
    """What a lane offers where the daemon works in the tensors' own memory. Called locked.

    Out: find -> produced -> a Store for each chunk -> the source is let go, which may be before
    the daemon has read it: then `overtake` orders that on the device.
    Back: allocate -> find -> produced -> a Restore for each chunk -> Restored -> use. The bytes may
    be handed out before Restored where streams wait for them: `await_restored`.
    """

    segments: Segments
    """The allocations that the daemon has mapped."""
    waits_on_device: bool
    """Whether a stream that waits for the daemon costs it nothing."""

    @property
    def last_number(self) -> int:
        """The sequence number that was drawn last."""
        ...

    def is_read(self, sequence: int) -> bool:
        """Tell whether the sources of all stores up to `sequence` have been read."""
        ...

    def overtake(self, sequence: int, source: torch.UntypedStorage) -> None:
        """Let nothing reuse the memory of `source`, once dropped, before that is so."""
        ...

    def find(self, address: int, nbytes: int) -> Mapped | None:
        """Return where the daemon has mapped the range, None where it has not (yet)."""
        ...

    def offers(self) -> list[Mappable]:
        """Return what has a daemon that takes over map all that is mapped, in this order."""
        ...

    def sweep(self) -> bool:
        """Have freed allocations unmapped; tell whether a mapping of one is being given up."""
        ...

    def barrier(self) -> MapSegment:
        """Return an offer that is answered only when all unmapped so far is unmapped."""
        ...

    def produced(self, count: int) -> range:
        """Return `count` sequence numbers that say the current stream's work so far is done."""
        ...

    def await_restored(self, tickets: Sequence[int]) -> None:
        """Have this thread's later work come behind restores, until `release` at the latest."""
        ...

    def release(self, ticket: int) -> None:
        """Let nothing wait for a restore any longer: it has failed."""
        ...

    def outcome(self, ticket: int) -> int | None:
        """Return the status that the device has left of a restore, 0 if it was verified.

        None where the bytes are not there. Asked once the daemon that was asked for it is dead, and
        its device does nothing more.
        """
        ...

    def headroom(self) -> int:
        """Return by how much less is allocated on the device now than was at the most."""
        ...


class Lane(ABC):
    """What the session needs from a data path, called from several threads.

    Bytes are passed as storages on `device`, with the offset at which they begin. Methods marked
    "locked" are called with the session's lock held and must return at once.

    Out: stage into a slot -> publish, Store is sent -> Stored, Rejected or Failed.
    Back: publish, Restore into a slot is sent -> Restored -> unstage.

    What is not abstract does here what a device needs whose work is done when a call returns.
    """

    device: torch.device
    hello: LaneHello
    staging_bytes: int = 0
    """Size of the staging area; known from attach on."""
    budget_bytes: int = 0
    """The most device memory that may wait for the link, in flight out or back early."""
    keeps_stored = False
    """Whether stored chunks wait in the staging area while there is room: where the way from the
    arena is much slower than a copy."""

    @property
    def in_place(self) -> InPlace | None:
        """The way past the staging area, None where there is none; known from attach on."""
        return None

    @abstractmethod
    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        """Map what the daemon shares; called once, before anything else.

        `descriptors` are those of the lifeline, the timeline page first. The lane duplicates or
        maps what it needs: the caller closes them.
        """

    def offers(self) -> list[MapSegment]:
        """Return what a daemon that takes over has to map of the lane's own memory."""
        return []

    def publish(self) -> int:
        """Return the sequence number for the message about to be sent (locked).

        It says that all copies so far are made: what was staged is there, and slots that were given
        back may be overwritten. Messages are sent in the order of these calls.
        """
        return 0

    @abstractmethod
    def stage(self, source: torch.UntypedStorage, begin: int, slot: Slot) -> None:
        """Copy the bytes from `begin` on, as many as the slot has, into it.

        The caller may drop `source` as soon as it returns.
        """

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return uninitialised memory to restore into."""

    @abstractmethod
    def unstage(self, slot: Slot, destination: torch.UntypedStorage, begin: int) -> None:
        """Copy a restored chunk out of the slot to where it begins in `destination`.

        In order before later work of this thread.
        """

    def current_stream(self) -> Stream:
        """Return the stream whose work so far makes what this thread saves now."""
        return None

    def reaches(self, stream: Stream) -> bool:  # noqa: ARG002 - there is but one
        """Tell whether work may be put on `stream` now, which the script may have destroyed."""
        return True

    def on(self, stream: Stream) -> AbstractContextManager[object] | None:  # noqa: ARG002
        """Return a context in which `stream` is the current one, None where it is."""
        return None

    def is_capturing(self) -> bool:
        """Tell whether this thread's work is being captured: then no copy may be ordered to it."""
        return False

    def use(self, restored: torch.UntypedStorage) -> None:  # noqa: B027 - what was copied is there
        """Order this thread's later work behind the copies that filled `restored`."""

    def poison(self) -> None:  # noqa: B027 - no thread waits on a counter
        """Release every wait on the daemon's counters: the daemon is dead. Any thread, once."""

    @abstractmethod
    def close(self) -> None:
        """Give up the staging area. Calling it twice is fine."""
