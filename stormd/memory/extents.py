"""The records of a blob in the disk tier's file, as numbers only.

A blob lies there in records of whole pages, each with a seal behind its bytes. One record is
written or read at one time. It is long enough for a disk's full speed, and short enough that its
writer or reader needs little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from stormd.memory.arena import granules

__all__ = ["PAGE", "PAYLOAD_BYTES", "RECORD_BYTES", "SEAL_BYTES", "Record", "disk_bytes", "records"]

PAGE: Final = 4096
"""Offsets, lengths and addresses are multiples of so many bytes: no disk asks for more."""

RECORD_BYTES: Final = 4 << 20
"""Bytes of the file for a full record, with its seal."""

SEAL_BYTES: Final = 16

PAYLOAD_BYTES: Final = RECORD_BYTES - SEAL_BYTES


class Record(NamedTuple):
    """Bytes `begin` to `begin` + `nbytes` of a blob, as its record with the number `number`.

    They begin `place` bytes behind the beginning of the blob's extent and take `pages` bytes of it.
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
