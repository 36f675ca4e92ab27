"""What a blob takes of the file of the tier on disk, as numbers only.

A blob lies there in records of whole pages, each with a seal behind its bytes. A record is what is
written and read at one time: long enough for a disk's full speed, short enough that whoever does so
needs little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from stormd.memory.arena import granules

__all__ = ["PAGE", "PAYLOAD_BYTES", "RECORD_BYTES", "SEAL_BYTES", "Record", "disk_bytes", "records"]

PAGE: Final = 4096
"""Bytes that offsets, lengths and addresses are whole numbers of: no disk asks for more."""

RECORD_BYTES: Final = 4 << 20
"""Of the file: a whole record, with its seal."""

SEAL_BYTES: Final = 16

PAYLOAD_BYTES: Final = RECORD_BYTES - SEAL_BYTES


class Record(NamedTuple):
    """Bytes `begin` to `begin` + `nbytes` of a blob, as its record of number `number`.

    They lie `place` bytes behind the beginning of the blob's extent and take `pages` of it.
    """

    number: int
    begin: int
    nbytes: int
    place: int
    pages: int


def records(nbytes: int) -> Iterator[Record]:
    """Yield the records of a blob."""
    for number, begin in enumerate(range(0, nbytes, PAYLOAD_BYTES)):
        size = min(PAYLOAD_BYTES, nbytes - begin)
        yield Record(number, begin, size, number * RECORD_BYTES, granules(size + SEAL_BYTES, PAGE))


def disk_bytes(nbytes: int) -> int:
    """Return the bytes of the file that a blob of `nbytes` takes."""
    full, rest = divmod(nbytes, PAYLOAD_BYTES)
    return full * RECORD_BYTES + (granules(rest + SEAL_BYTES, PAGE) if rest else 0)
