"""What the daemon is told of this process's device memory, and what it has answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, TypeAlias

from stormd.protocol import MapPiece, MapSegment, ReserveRange

__all__ = ["Driver", "Mappable", "Offered", "State"]

Mappable: TypeAlias = MapSegment | ReserveRange | MapPiece
"""What a daemon is offered."""


class Driver(Protocol):
    """What is asked of the device's driver; a call raises CudaDriverError for a bad address."""

    def buffer_id(self, address: int) -> int:
        """Return the id of the allocation at `address`."""
        ...

    def allocation(self, address: int) -> tuple[int, int]:
        """Return its first address and its bytes."""
        ...

    def exportable(self, address: int) -> bool:
        """Tell whether another process can map it by a handle."""
        ...

    def ipc_handle(self, address: int) -> bytes:
        """Return the handle for that; `address` is the first."""
        ...

    def retain_piece(self, address: int) -> int | None:
        """Return the handle of the piece of a reserved range that is mapped there, None for none.

        What is retained keeps its handle until it is released.
        """
        ...

    def release_piece(self, handle: int) -> None:
        """Give it up."""
        ...

    def holds(self, address: int, handle: int) -> bool:
        """Tell whether the piece of a retained handle is what is mapped at `address`."""
        ...

    def share_piece(self, handle: int) -> int:
        """Return a descriptor by which another process can map it."""
        ...

    def reserved_range(self, address: int) -> tuple[int, int]:
        """Return the first address and the bytes of the reserved range at `address`."""
        ...


class State(Enum):
    """What becomes of an offer."""

    OFFERED = auto()
    """The daemon's answer is awaited."""
    MAPPED = auto()
    REFUSED = auto()
    """It cannot be exported or mapped, and is not offered again."""


@dataclass(slots=True, eq=False)
class Offered:
    """Memory by the number under which a daemon knows it.

    What is not `known` any more is unmapped at the latest when the answer comes.
    """

    number: int
    state: State
    known: bool = field(default=True, init=False)
