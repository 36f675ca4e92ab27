"""The timeline page: some shared host memory per session, of 64-bit counters.

A counter never decreases, and each has one writer at a time. Both processes map the page and
register it with CUDA, so that streams write the counters, a client's wait on them, and both CPUs
can read them. A side that finds its peer dead stores POISON into the counters that its own side
waits on: every wait (GEQ) is over at once, and the value is not one that work could reach.

The page outlives a daemon whose sessions do. What it says is then all that is known of the work
that the dead one's device had been given: behind each restore's counter its decoder's status.
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
"""Whole pages of the host."""

PUBLISHED = 0
"""Byte offset; written by the client: the operations whose input is ready."""

STORED = 64
"""Byte offset; written by the daemon: the stores whose source may be used again."""

_RESTORED = 4096
RESTORED_SLOTS = 1024
"""Counters of restores, from `_RESTORED` on: so many may be waited for at one time. Each has 8
bytes, and as many behind it for its decoder's status."""


def restored_slot(ticket: int) -> int:
    """Return the byte offset of the counter that says that the restore `ticket` is there.

    The daemon writes the ticket there, whose successors in the same slot are larger; the client
    does so for a restore that has failed, which nobody may wait for any longer.
    """
    return _RESTORED + 16 * (ticket % RESTORED_SLOTS)


def status_slot(ticket: int) -> int:
    """Return the byte offset of the status of the decoder whose counter says the ticket.

    It is 0 where the bytes were verified. Written before the counter is; it is no counter, and
    means nothing while the counter says anything else than the ticket.
    """
    return restored_slot(ticket) + 8


POISON = 1 << 62
"""Far above any real value; below 2^63, so signed and unsigned comparisons agree."""


class Timelines:
    """The counters of the page that is mapped at `address`, as this process's CPU sees them.

    Not to be used once the page is unmapped. Reading and storing are single aligned 8-byte
    accesses, so neither side ever sees half of a value.
    """

    def __init__(self, address: int) -> None:
        self._words = (ctypes.c_uint64 * (PAGE_BYTES // 8)).from_address(address)

    def read(self, counter: int) -> int:
        """Return the value of the counter at byte offset `counter`."""
        return self._words[counter // 8]

    def store(self, counter: int, value: int) -> None:
        """Raise a counter to `value`; a smaller value than it has changes nothing."""
        # Not max(): writing the old value back could undo what a device wrote meanwhile.
        if value > self._words[counter // 8]:  # noqa: PLR1730
            self._words[counter // 8] = value

    def put(self, word: int, value: int) -> None:
        """Set a word that is no counter to `value`."""
        self._words[word // 8] = value

    def poison(self, *counters: int) -> None:
        """End every wait on one of these counters, now and from now on."""
        for counter in counters:
            self.store(counter, POISON)
