"""What this process tells the daemon about its device memory, and the daemon's answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, TypeAlias

from stormd.protocol import MapPiece, MapSegment, ReserveRange

__all__ = ["Driver", "Mappable", "Offered", "State"]

Mappable: TypeAlias = MapSegment | ReserveRange | MapPiece
"""Memory that is offered to a daemon."""


class Driver(Protocol):
    """Calls to the device's driver; each raises CudaDriverError for a bad address."""

    def buffer_id(self, address: int) -> int:
        """Return the id of the allocation at `address`."""

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the first address and the size in bytes of the allocation at `address`."""

    def exportable(self, address: int) -> bool:
        """Return whether another process can map the allocation by an IPC handle."""

    def ipc_handle(self, address: int) -> bytes:
        """Return the IPC handle; `address` must be the allocation's first."""

    def retain_piece(self, address: int) -> int | None:
        """Return the handle of the reserved range's piece that is mapped at `address`, or None.

        A retained piece keeps its handle until it is released.
        """

    def release_piece(self, handle: int) -> None:
        """Release a retained piece."""

    def holds(self, address: int, handle: int) -> bool:
        """Return whether the piece mapped at `address` has this retained handle."""

    def share_piece(self, handle: int) -> int:
        """Return a descriptor by which another process can map the piece."""

    def reserved_range(self, address: int) -> tuple[int, int]:
        """Return the first address and the size in bytes of the reserved range at `address`."""


class State(Enum):
    """The state of an offer."""

    OFFERED = auto()
    """The daemon has not answered yet."""
    MAPPED = auto()
    REFUSED = auto()
    """The memory cannot be exported or mapped, and is not offered again."""


@dataclass(slots=True, eq=False)
class Offered:
    """Memory with the number by which a daemon knows it.

    Memory that is no longer `known` is unmapped when the offer's answer comes, at the latest.
    """

    number: int
    state: State
    known: bool = field(default=True, init=False)
