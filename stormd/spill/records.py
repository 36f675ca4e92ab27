"""Moves a blob between the pool and the file, a record at a time.

A record goes through a worker's own memory, whose pages a disk can reach: in the pool a blob begins
and ends at any granule, and on the disk it is encrypted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Final

from stormd.lanes.host_codec import Buffer
from stormd.memory.arena import Block, Extent
from stormd.memory.extents import PAYLOAD_BYTES, RECORD_BYTES, records
from stormd.memory.host_pool import gather, scatter
from stormd.spill.file import SpillFile
from stormd.spill.sealing import Label, Sealer

__all__ = ["WORKER_BYTES", "BlobMover", "Damaged"]

WORKER_BYTES: Final = RECORD_BYTES + PAYLOAD_BYTES
"""Of memory that a worker may take; half of it only for blobs that lie in pieces."""


class Damaged(Exception):
    """What was read is not what was written."""


class BlobMover:
    """One worker's way between the pool, at `pool_address`, and the file. Not thread-safe.

    A blob is named by its session, entry and generation; what is read must have been written under
    the same name. Both ways yield behind each record.
    """

    def __init__(self, pool_address: int, file: SpillFile, sealer: Sealer) -> None:
        self._pool_address = pool_address
        self._file = file
        self._sealer = sealer
        self._record = Buffer(RECORD_BYTES)
        self._whole = Buffer(PAYLOAD_BYTES)  # of a record whose bytes lie in pieces in the pool
        self._view = memoryview(
            (ctypes.c_ubyte * RECORD_BYTES).from_address(self._record.address)
        ).cast("B")

    def write(self, name: tuple[int, int, int], block: Block, extent: Block) -> Iterator[None]:
        """Write the blob in `block` to `extent`.

        Raises:
            OSError: part of it may be there.
        """
        blob, room = block.pieces(), extent.pieces()
        for record in records(block.nbytes):
            source = self._gathered(_cut(blob, record.begin, record.nbytes))
            label = Label(*name, block.nbytes, record.number)
            self._sealer.seal(label, source, record.nbytes, self._record.address)
            done = 0
            for offset, size in _cut(room, record.place, record.pages):
                self._file.write(offset, self._view[done : done + size])
                done += size
            yield

    def read(self, name: tuple[int, int, int], extent: Block, block: Block) -> Iterator[None]:
        """Read the blob at `extent` to `block`, which may hold anything until that is done.

        Raises:
            OSError: it cannot be read.
            Damaged: it is not the blob that was written there under this name.
        """
        blob, room = block.pieces(), extent.pieces()
        for record in records(block.nbytes):
            done = 0
            for offset, size in _cut(room, record.place, record.pages):
                self._file.read(offset, self._view[done : done + size])
                done += size
            label = Label(*name, block.nbytes, record.number)
            pieces = _cut(blob, record.begin, record.nbytes)
            target = self._address(pieces)
            if not self._sealer.open(label, self._record.address, record.nbytes, target):
                end = record.begin + record.nbytes
                raise Damaged(f"bytes {record.begin} to {end} are not what was written")
            self._scatter(pieces)
            yield

    def close(self) -> None:
        """Give the memory back. Twice is fine."""
        self._record.close()
        self._whole.close()

    # --- pieces in the pool -----------------------------------------------------------------

    def _address(self, pieces: Sequence[Extent]) -> int:
        """Return where a record's bytes are whole: in the pool, or here if they lie in pieces."""
        if len(pieces) == 1:
            return self._pool_address + pieces[0].offset
        return self._whole.address

    def _gathered(self, pieces: Sequence[Extent]) -> int:
        """Return where a record's bytes are whole, having joined them there."""
        if len(pieces) > 1:
            gather(self._pool_address, pieces, self._whole.address)
        return self._address(pieces)

    def _scatter(self, pieces: Sequence[Extent]) -> None:
        if len(pieces) > 1:
            scatter(self._pool_address, pieces, self._whole.address)


def _cut(pieces: Sequence[Extent], begin: int, nbytes: int) -> list[Extent]:
    """Return the ranges that hold `nbytes` of what the pieces hold in their order, from `begin`."""
    found = []
    for offset, size in pieces:
        skipped = min(begin, size)
        taken = min(size - skipped, nbytes)
        if taken:
            found.append(Extent(offset + skipped, taken))
        begin, nbytes = begin - skipped, nbytes - taken
    return found
