"""The data paths of the client, one module a kind of device.

A lane moves bytes between tensors and the staging area that it shares with the daemon. It owns
that area, and it knows what orders its moves: the host's program order on the cpu lane, streams
and the timeline page on the cuda lane. What is stored when, and who waits for which message, is
the session's business.

What stays true: a slot's bytes are overwritten only after whoever used the range before is done
with it. Where a device works asynchronously the lane orders that itself, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from stormd.protocol import MapSegment, Message, Welcome

if TYPE_CHECKING:
    from storm_client.lanes.segments import Segments

__all__ = ["InPlace", "Lane", "LaneHello", "Request", "Slot"]

Request = Callable[[Message], Message]
"""Sends a message to the daemon and returns its answer; raises a StormError when refused."""


@dataclass(frozen=True, slots=True)
class LaneHello:
    """What Hello says about a lane; the fields mean what they mean there."""

    device: str
    device_uuid: str = ""
    ipc_modes: tuple[str, ...] = ()
    staging_bytes: int = 0
    features: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class Slot:
    """A range of a segment in use for one part: of the staging area, or where a tensor lies."""

    segment: int
    offset: int
    nbytes: int


class InPlace(Protocol):
    """What a lane offers where the daemon works in the tensors' own memory. Called locked.

    Out: find -> produced -> a Store for each part -> the source is let go, which may be before
    the daemon has read it: then `overtake` orders that on the device.
    Back: allocate -> find -> produced -> a Restore for each part -> Restored -> use.
    """

    segments: Segments
    """The allocations that the daemon has mapped."""
    budget_bytes: int
    """The most device memory that may wait for the link, on its way out or back early."""
    waits_on_device: bool
    """Whether `overtake` costs the daemon nothing: both processes use the device at once."""

    def find(self, address: int, nbytes: int) -> Slot | None:
        """Return the range as a part of a mapped segment, None where it is in none (yet)."""
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

    def is_read(self, sequence: int) -> bool:
        """Tell whether the daemon has read the sources of all stores up to `sequence`."""
        ...

    def overtake(self, sequence: int, source: torch.UntypedStorage) -> None:
        """Let nothing reuse the memory of `source`, once dropped, before that is so."""
        ...

    def headroom(self) -> int:
        """Return by how much less is allocated on the device now than was at the most."""
        ...


class Lane(Protocol):
    """What the session needs from a data path, called from several threads.

    Bytes are passed as contiguous one-dimensional uint8 tensors on `device`. Methods marked
    "locked" are called with the session's lock held and must return at once.

    Out: reserve -> stage -> publish, Store is sent -> Stored, Rejected or Failed -> free.
    Back: reserve -> publish, Restore is sent -> Restored -> unstage -> free; free alone where
    the part is not wanted any more.
    """

    device: torch.device
    hello: LaneHello
    staging_bytes: int
    """Size of the staging area; known from attach on."""
    keeps_stored: bool
    """Whether stored parts wait in the staging area while there is room: where the way from the
    arena is much slower than a copy."""

    @property
    def in_place(self) -> InPlace | None:
        """The way past the staging area, None where there is none; known from attach on."""
        ...

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        """Map what the daemon shares; called once, before anything else.

        `descriptors` are those of the lifeline, the timeline page first. The lane duplicates or
        maps what it needs: the caller closes them.
        """
        ...

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a slot of `nbytes`, None where there is no room now (locked)."""
        ...

    def free(self, slot: Slot) -> None:
        """Take a slot back; it is not used again (locked)."""
        ...

    def publish(self, slot: Slot) -> int:
        """Return the sequence number for the message about to be sent (locked).

        For a Store it says that what was staged is there, for a Restore that the slot may be
        overwritten. Messages are sent in the order of these calls.
        """
        ...

    def stage(self, source: torch.Tensor, slot: Slot) -> None:
        """Copy `source` into the slot. The caller may drop `source` as soon as it returns."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of `nbytes` to restore into."""
        ...

    def unstage(self, slot: Slot, destination: torch.Tensor) -> None:
        """Copy a restored part out of the slot, in order before later work of this thread."""
        ...

    def use(self, restored: torch.UntypedStorage) -> None:
        """Order this thread's later work behind the copies that filled `restored`."""
        ...

    def poison(self) -> None:
        """Release every wait on the daemon's counters: the daemon is dead. Any thread, once."""
        ...

    def close(self) -> None:
        """Give up the staging area. Calling it twice is fine."""
        ...
