"""Lanes, which move bytes between tensors and the daemon: one module per kind of device.

A lane owns the staging area that it shares with the daemon, and knows what orders its copies. On
the cpu lane this is the host's program order, on the cuda lane streams and the timeline page. On
the cuda lane the device itself waits until the previous user of a slot has finished. Other modules
decide what is stored when, and who waits for which message.

A **route** says how one chunk travels: `Staged` means by a copy in the staging area; `Mapped` means
in memory of this process that the daemon has mapped. A lane with access in place makes the staging
area only when a chunk cannot be mapped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeAlias

import torch

from stormd.protocol import MapSegment, Message, ReserveRange, Welcome

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
    "StagingArea",
    "Stream",
]

NOTHING = nullcontext()

STAGING = 0
"""The number of the segment that is the staging area."""

Stream: TypeAlias = torch.Stream | None
"""A stream of an asynchronous device; None for its default stream, or if it has no streams."""

Request = Callable[[Message], Message]
"""Sends a message to the daemon and returns its answer; raises a StormError if refused."""


@dataclass(frozen=True, slots=True)
class LaneHello:
    """The lane's part of the Hello message; the fields have the same meaning there."""

    device: str
    device_uuid: str = ""
    staging_bytes: int = 0
    features: tuple[str, ...] = ()


class StagingArea(NamedTuple):
    """Where a staging area lies, and its size in bytes."""

    address: int
    nbytes: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """A range of the staging area for one chunk; whoever holds this object owns the range."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Staged:
    """The route by a copy in the staging area, which holds the bytes themselves."""

    offset: int
    segment: ClassVar[int] = STAGING


@dataclass(frozen=True, slots=True)
class Mapped:
    """The route in the tensor's own memory, which the daemon has mapped."""

    segment: int
    offset: int


Route: TypeAlias = Staged | Mapped
"""How a chunk's bytes travel; decided once for each transfer."""


class InPlace(Protocol):
    """A lane's operations if the daemon works in the tensors' own memory. Called locked, except
    `make_staging`.

    Store: find -> publish_numbers -> a Store for each chunk -> the source is freed. This may be
    before the daemon has read the source: then `wait_before_reuse` orders the reuse of its memory
    on the device.
    Restore: allocate -> find -> publish_numbers -> a Restore for each chunk -> Restored -> the
    memory is used. If streams wait (`await_restored`), it may be handed out before Restored.
    """

    segments: Segments
    """The allocations that the daemon has mapped."""
    waits_on_device: bool
    """Whether the daemon loses no time if a stream waits for it."""

    @property
    def last_number(self) -> int:
        """The latest sequence number."""

    def is_read(self, sequence: int) -> bool:
        """Return whether the sources of all stores up to `sequence` have been read."""

    def wait_before_reuse(self, sequence: int, source: torch.UntypedStorage) -> None:
        """Let nothing reuse the memory of `source`, once freed, before `is_read(sequence)`."""

    def find(self, address: int, nbytes: int) -> Mapped | None:
        """Return where the daemon has mapped the range, None if it has not (yet)."""

    def awaits_answer(self, address: int, nbytes: int) -> bool:
        """Return whether the daemon has yet to say if it maps the range, which was not found."""

    def make_staging(self) -> StagingArea:
        """Return the staging area, for memory that cannot be mapped; make it unless it is there.

        This may wait for the device: call it without the lock. If an interrupt ends the call, the
        area is either made nevertheless or not made.

        Raises:
            UsageError: the device has no memory for it.
            DaemonLost: the lane is closed.
        """

    def offer_staging(self, address: int) -> None:
        """Offer the staging area at `address` to the daemon, unless that was done."""

    def offers(self) -> list[Mappable]:
        """Return the offers that make the next daemon map all mapped memory, in this order."""

    def sweep(self) -> bool:
        """Have freed allocations unmapped; return whether any of them was mapped."""

    def barrier(self) -> ReserveRange:
        """Return an offer that is answered only when all earlier unmapping is done."""

    def publish_numbers(self, count: int) -> range:
        """Return `count` numbers that are published after the current stream's work so far."""

    def await_restored(self, tickets: Sequence[int]) -> None:
        """Order this thread's later work after the restores; `end_waits` also ends a wait."""

    def end_waits(self, ticket: int) -> None:
        """End all waits for a restore: it has failed."""

    def restore_status(self, ticket: int) -> int | None:
        """Return the status that the device has left of a restore, 0 if it was verified.

        Return None if the bytes are not there. Call this once the daemon is dead and its device
        does nothing more.
        """

    def headroom(self) -> int:
        """Return the device's peak of allocated bytes less its present allocated bytes."""


class Lane(ABC):
    """What a session needs to move data; several threads call it.

    Bytes are passed as storages on `device`, with the offset at which they begin. Methods marked
    "locked" are called with the session's lock held and must return at once.

    Store: stage into a slot -> publish, Store is sent -> Stored, Rejected or Failed.
    Restore: publish, Restore into a slot is sent -> Restored -> unstage.

    The methods that are not abstract implement a synchronous device, whose work is done when a call
    returns.
    """

    device: torch.device
    hello: LaneHello
    staging_bytes: int = 0
    """Size of the staging area that `attach` has made; 0 if it is made when it is first needed."""
    budget_bytes: int = 0
    """The most device memory that may wait for the link: in flight, held or prefetched."""
    keeps_stored = False
    """Whether stored chunks remain in the staging area while there is room: useful if a restore
    from the arena is much slower than a copy."""

    @property
    def in_place(self) -> InPlace | None:
        """The access to tensors in place, None if there is none; known after `attach`."""
        return None

    @abstractmethod
    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        """Map the memory that the daemon shares; called once, before anything else.

        `descriptors` come from the lifeline, the timeline page first. The lane duplicates or maps
        what it needs: the caller closes them.
        """

    def offers(self) -> list[MapSegment]:
        """Return the lane's own memory that the next daemon has to map."""
        return []

    def publish(self) -> int:
        """Return the sequence number for the message about to be sent (locked).

        It says that all copies so far are complete: staged bytes are there, and freed slots may be
        overwritten. Messages are sent in the order of these calls.
        """
        return 0

    @abstractmethod
    def stage(self, source: torch.UntypedStorage, begin: int, slot: Slot) -> None:
        """Copy bytes from `begin` on into the slot, as many as the slot has.

        The caller may drop `source` as soon as this returns.
        """

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return uninitialised memory for a restore."""

    @abstractmethod
    def unstage(self, slot: Slot, destination: torch.UntypedStorage, begin: int) -> None:
        """Copy a restored chunk from the slot to offset `begin` of `destination`.

        The copy is ordered before later work of this thread.
        """

    def current_stream(self) -> Stream:
        """Return the stream whose work so far computes what this thread saves now."""
        return None

    def can_use_stream(self, stream: Stream) -> bool:  # noqa: ARG002 - there is but one
        """Return whether work may be put on `stream` now: the script may have destroyed it."""
        return True

    def on_stream(self, stream: Stream) -> AbstractContextManager[object] | None:  # noqa: ARG002
        """Return a context in which `stream` is the current one, None if it is already."""
        return None

    def is_capturing(self) -> bool:
        """Return whether this thread's work is being captured; then no copy may be added to it."""
        return False

    def order_after_copies(self, restored: torch.UntypedStorage) -> None:  # noqa: B027 - what was copied is there
        """Order this thread's later work after the copies that filled `restored`."""

    def poison(self) -> None:  # noqa: B027 - no thread waits on a counter
        """End all waits on the daemon's counters: it is dead. Any thread may call this, once."""

    @abstractmethod
    def close(self) -> None:
        """Free the staging area. A second call has no effect."""
