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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch

from stormd.protocol import MapSegment, Message, Welcome

if TYPE_CHECKING:
    from storm_client.lanes.segments import Segments

__all__ = [
    "Coder",
    "Encoded",
    "InPlace",
    "Lane",
    "LaneHello",
    "Reader",
    "Request",
    "Slot",
    "Stream",
]

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


@dataclass(eq=False, slots=True)
class Slot:
    """A range of a segment in use for one part: of the staging area, or where a tensor lies."""

    segment: int
    offset: int
    nbytes: int


class Reader(Protocol):
    """Who reads sources where they lie: the daemon, or this process's encoder. Called locked."""

    waits_on_device: bool
    """Whether `overtake` costs the reader nothing."""

    def is_read(self, sequence: int) -> bool:
        """Tell whether the sources of all stores up to `sequence` have been read."""
        ...

    def overtake(self, sequence: int, source: torch.UntypedStorage) -> None:
        """Let nothing reuse the memory of `source`, once dropped, before that is so."""
        ...


class Encoded(NamedTuple):
    """What a Store says of a blob: its sequence number, and where its size will be."""

    sequence: int
    result: int


class Coder(Reader, Protocol):
    """What a lane offers where this process codes, through slots that hold blobs. Called locked.

    Out: produced -> encode -> a Store -> Stored, Rejected or Failed -> take_back, and the slot is
    freed. The source may be dropped when it has been read.
    """

    def codes(self, dtype: str, codec: str) -> bool:
        """Tell whether elements of that type can be encoded now, and what comes of it decoded."""
        ...

    def room(self, nbytes: int) -> int:
        """Return the bytes of a slot that holds the largest blob of `nbytes`."""
        ...

    def encode(
        self,
        source: torch.UntypedStorage,
        part: range,
        slot: Slot,
        *,
        dtype: str,
        codec: str,
        after: int,
    ) -> Encoded | None:
        """Encode the bytes `part` of `source`, behind what `after` published.

        Returns None where that cannot be begun now.
        """
        ...

    def take_back(self, result: int) -> None:
        """Use a result again: its store has been answered."""
        ...


class InPlace(Reader, Protocol):
    """What a lane offers where the daemon works in the tensors' own memory. Called locked.

    Out: find -> produced -> a Store for each part -> the source is let go, which may be before
    the daemon has read it: then `overtake` orders that on the device.
    Back: allocate -> find -> produced -> a Restore for each part -> Restored -> use.
    """

    segments: Segments
    """The allocations that the daemon has mapped."""
    maps_new_memory: bool
    """Whether the daemon can map what PyTorch allocates now, and so restore into it."""
    budget_bytes: int
    """The most device memory that may wait for the link, on its way out or back early."""

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

    @property
    def coder(self) -> Coder | None:
        """The codec of this process, None where the daemon codes; known from attach on."""
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

    def current_stream(self) -> Stream:
        """Return the stream whose work so far makes what this thread saves now."""
        ...

    def reaches(self, stream: Stream) -> bool:
        """Tell whether work may be put on `stream` now, which the script may have destroyed."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the current one."""
        ...

    def is_capturing(self) -> bool:
        """Tell whether this thread's work is being captured: then no copy may be ordered to it."""
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
