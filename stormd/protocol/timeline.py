"""The timeline page: shared host memory with 64-bit counters, one page for each session.

A counter never decreases and has one writer at a time. Both processes map the page and register it
with CUDA: streams write the counters, the client's streams wait on them, and both CPUs can read
them. A side that finds its peer dead stores POISON into the counters that its own side waits on.
Then every wait (GEQ) ends at once, and work can never reach that value.

The page outlives a daemon whose sessions do. It is then the only record of the work that the dead
daemon had given its device: the status of a restore's decoder follows the restore's counter.
"""

from __future__ import annotations

import ctypes

__all__ = [
    "PAGE_BYTES",
    "POISON",
    "PUBLISHED",
    "RESTORED_SLOTS",
    "STORED",
    "Timelines",
    "restored_slot",
    "status_slot",
]

PAGE_BYTES = 20480
"""The page's size: a whole number of the host's memory pages."""

PUBLISHED = 0
"""Byte offset. The client writes here how far its operations' inputs are ready."""

STORED = 64
"""Byte offset. The daemon writes here up to which store the sources may be used again."""

_RESTORED = 4096
RESTORED_SLOTS = 1024
"""Number of restore counters, from `_RESTORED` on: the client may wait for so many at a time. Each
has 8 bytes, followed by 8 bytes for its decoder's status."""


def restored_slot(ticket: int) -> int:
    """Return the byte offset of the counter that shows the completion of restore `ticket`.

    The daemon writes the ticket there; later tickets of the same slot are larger. If the restore
    has failed, the client writes the ticket, since nobody may wait for it any longer.
    """
    return _RESTORED + 16 * (ticket % RESTORED_SLOTS)


def status_slot(ticket: int) -> int:
    """Return the byte offset of the decoder status that belongs to the ticket's counter.

    The status is 0 if the bytes were verified. It is written before the counter. It is no counter,
    and has no meaning unless the counter equals the ticket.
    """
    return restored_slot(ticket) + 8


POISON = 1 << 62
"""Far above any real value, and below 2^63, so signed and unsigned comparisons agree."""


class Timelines:
    """The counters of the page mapped at `address`, as this process's CPU sees them.

    Must not be used once the page is unmapped. Each read or store is a single aligned 8-byte
    access, so neither side ever sees half of a value.
    """

    def __init__(self, address: int) -> None:
        self._words = (ctypes.c_uint64 * (PAGE_BYTES // 8)).from_address(address)

    def read(self, counter: int) -> int:
        """Return the value of the counter at byte offset `counter`."""
        return self._words[counter // 8]

    def store(self, counter: int, value: int) -> None:
        """Raise a counter to `value`; a value below the current one changes nothing."""
        # Not max(): writing the old value again could undo a device's write in between.
        if value > self._words[counter // 8]:  # noqa: PLR1730
            self._words[counter // 8] = value

    def put(self, word: int, value: int) -> None:
        """Set a word that is not a counter to `value`."""
        self._words[word // 8] = value

    def poison(self, *counters: int) -> None:
        """End every wait on one of these counters, now and from now on."""
        for counter in counters:
            self.store(counter, POISON)
