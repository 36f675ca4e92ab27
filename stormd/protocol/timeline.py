"""The timeline page: one shared host page per session, of 64-bit counters and encoders' results.

A counter never decreases, and each has one writer. Both processes map the page and register it with
CUDA, so that streams write the counters, a client's wait on them, and both CPUs can read them. A
side that finds its peer dead stores POISON into the counters that its own side waits on: every wait
(GEQ) is over at once, and the value is not one that work could reach.

Where the client encodes, its encoder leaves a result in the page before `published` says so.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple

__all__ = [
    "PAGE_BYTES",
    "POISON",
    "PUBLISHED",
    "RESULTS",
    "STORED",
    "EncoderResult",
    "Timelines",
    "result_offset",
]

PAGE_BYTES = 4096

PUBLISHED = 0
"""Byte offset; written by the client: the operations whose input is ready."""

STORED = 64
"""Byte offset; written by the daemon: the stores whose source may be used again."""

POISON = 1 << 62
"""Far above any real value; below 2^63, so signed and unsigned comparisons agree."""


RESULTS: Final = 64
"""How many encoders' results the page holds; they are numbered from 1."""

_FIRST_RESULT: Final = 2048
_RESULT_BYTES: Final = 32


class EncoderResult(NamedTuple):
    """What an encoder leaves, as its client wrote it: nothing in it has been checked."""

    nbytes: int
    status: int
    mode: int


def result_offset(number: int) -> int:
    """Return where in the page the result of that number is: three words, in order."""
    return _FIRST_RESULT + (number - 1) * _RESULT_BYTES


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

    def result(self, number: int) -> EncoderResult:
        """Return the encoder's result of that number, 1 to RESULTS."""
        first = result_offset(number) // 8
        return EncoderResult(*self._words[first : first + 3])

    def poison(self, *counters: int) -> None:
        """End every wait on one of these counters, now and from now on."""
        for counter in counters:
            self.store(counter, POISON)
