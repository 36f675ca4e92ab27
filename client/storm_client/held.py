"""Which sources stay on the device, sent to the daemon or about to be: a pure queue.

What stays true: what is held is what was saved last, as much of it as the window allows; the
oldest goes first, because a backward pass needs it last. What is still held when it is needed is
used where it is, and never crosses the link back.

The session's lock protects a HeldBack. It keeps no record alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Generic, TypeVar

from storm_client.lanes import Reader
from storm_client.records import StoredRange
from storm_client.window import Window

__all__ = ["Held", "HeldBack"]


Admission = TypeVar("Admission")


@dataclass(eq=False, slots=True)
class Held(Generic[Admission]):
    """A record whose source stays for now, and what became of its store."""

    key: int
    record: weakref.ref[StoredRange]
    nbytes: int
    admission: Admission
    """What the daemon has said about it."""
    sequence: int | None = None
    """The number of its last part; None until that was sent."""
    produced: int = 0
    """The number that says its bytes are there, where this process encodes them."""
    sent: int = 0
    """Bytes of the parts that were sent."""
    reader: Reader | None = None
    """Who reads it, from its first part on."""


class HeldBack(Generic[Admission]):
    """Records with their sources, in the order in which they were stored."""

    def __init__(self, window: Window) -> None:
        """Hold as much as `window` allows."""
        self._window = window
        self.nbytes = 0
        self._held: dict[int, Held[Admission]] = {}

    def add(self, held: Held[Admission]) -> None:
        """Hold a record's source."""
        self._held[held.key] = held
        self.nbytes += held.nbytes

    def excess(self) -> Held[Admission] | None:
        """Return what has to go next, None where all may stay."""
        return next(iter(self._held.values())) if self.nbytes > self._window.limit else None

    def forget(self, key: int) -> Held[Admission] | None:
        """Hold a record no longer: it let its source go, or died, or keeps it for good."""
        held = self._held.pop(key, None)
        if held is not None:
            self.nbytes -= held.nbytes
        return held

    def __contains__(self, key: int) -> bool:
        """Tell whether the record's source is held."""
        return key in self._held

    def __len__(self) -> int:
        """Return the number of records held."""
        return len(self._held)
