"""What runs of compiled graphs keep by choice where a budget is one of bytes: all of them together.

What a graph keeps lies on the device until its backward pass, beside what others keep. So all that
are compiled for one client with the same budget share it, as blocks that are compiled one by one.
Each has its part from when it is compiled on, by which is planned what it recomputes.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from storm_client.devices import devices_in_use
from storm_client.planner.in_flight import free_bytes
from storm_client.transport.interrupts import Living
from stormd.protocol import Budget

if TYPE_CHECKING:
    from storm_client.transport.supply import Supply

__all__ = ["WHOLE", "Part", "Room", "room_for"]


class Part(NamedTuple):
    """What one model may keep of a budget of bytes that several share, each compiled by itself."""

    number: int = 0
    """How many of them were compiled before."""
    of: int = 1
    taken: int = 0
    """Bytes that those may keep."""

    def left(self, limit: int, least: int) -> int:
        """Return how many bytes that is of `limit`, of which one at a time needs `least` besides.

        Equal parts, but for what others could not use of theirs: blocks of a model are alike, and
        if the first ones kept all, the link would have nothing to do beside them, and more than it
        can carry beside the others.
        """
        return max(0, (self.number + 1) * max(0, limit - least) // self.of - self.taken)


WHOLE: Final = Part()
"""That of a model that shares it with none."""


class Sharing(Protocol):
    """Graphs that share a budget: what one of them `planned` to keep, and needs at the `least`."""

    @property
    def planned(self) -> int | None:
        """Bytes that a run may keep by its plan; None where none is compiled."""

    @property
    def least(self) -> int:
        """Bytes that one of the backward graphs needs with nothing kept by choice."""


class Kept(Protocol):
    """A value of `nbytes` bytes that a run keeps by choice."""

    nbytes: int


class Room:
    """What one budget lets stay, of which threads may take their parts at once."""

    def __init__(self, budget: Budget) -> None:
        """Let as many bytes stay as that says, or with "fit" as the device has free."""
        self._budget = budget
        self._has_gone_back = False
        """Whether a backward pass has begun, in any thread; never taken back."""
        self._sharing: Living[Sharing] = Living()
        self._kept: Living[Kept] = Living()

    def share(self, graphs: Sharing) -> None:
        """Have some graphs take part as long as they live."""
        self._sharing.add(graphs)

    def part_of(self, graphs: Sharing) -> Part:
        """Return which part is that of some graphs, of which one is about to be compiled."""
        others = [one for one in self._sharing if one is not graphs]
        taken = [one.planned for one in others if one.planned is not None]
        return Part(len(taken), len(others) + 1, sum(taken))

    @property
    def kept_bytes(self) -> int:
        """Bytes that are held by choice in runs whose backward pass is still to come."""
        return sum(held.nbytes for held in self._kept)

    def left(self, planned: int | None = None) -> int:
        """Return how many bytes a run that begins now may keep by choice.

        That is `planned` at the most; without a plan for it, an equal part. What any graph needs at
        the least is left free. Which graphs a step has is not known until a backward pass has
        begun, and nothing is kept before.
        """
        if not self._has_gone_back:
            return 0
        kept = self.kept_bytes
        if type(self._budget) is int:
            limit = self._budget
        else:
            devices = devices_in_use()
            limit = kept + free_bytes(devices) if devices else 0
        leasts = [one.least for one in self._sharing]
        least = max(leasts, default=0)
        if planned is None:
            planned = Part(of=max(1, len(leasts))).left(limit, least)
        return min(limit - kept - least, planned)

    def keep(self, held: Kept) -> None:
        """Count what is held by choice, until it dies."""
        self._kept.add(held)

    def goes_back(self) -> None:
        """Note that a backward pass has begun."""
        self._has_gone_back = True


def room_for(supply: Supply | None, budget: Budget) -> Room:
    """Return the room that graphs of one client share; None stands for the process's own.

    Where no run decides what is kept, each has one of its own, of which nothing is taken.
    """
    if type(budget) is not int and budget != "fit":
        return Room(budget)
    key = (None if supply is None else id(supply), budget)
    with _LOCK:
        reference = _ROOMS.get(key)
        room = None if reference is None else reference()
        if room is None:
            for gone in [old for old, one in _ROOMS.items() if one() is None]:
                del _ROOMS[gone]
            room = Room(budget)
            _ROOMS[key] = weakref.ref(room)
        return room


_LOCK = threading.Lock()  # protects the table
_ROOMS: dict[tuple[int | None, Budget], weakref.ref[Room]] = {}
"""By the client's supply, which lives as long as graphs that hold its room."""
