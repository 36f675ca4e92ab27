"""Moves a blob between the pool and the file, a record at a time.

Each record passes through a worker's own page-aligned memory, as O_DIRECT needs: a blob in the pool
begins and ends at any granule, and its record on disk is sealed and may be encrypted.
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
"""Memory of one worker; half of it is used only for blobs that are split in the pool."""


class Damaged(Exception):
    """The bytes that were read are not those that were written."""


class BlobMover:
    """Moves one worker's blobs between the pool, at `pool_address`, and the file. Not thread-safe.

    A blob's name is its session, entry and generation. A read succeeds only under the name under
    which the blob was written. `write` and `read` yield after each record.
    """

    def __init__(self, pool_address: int, file: SpillFile, sealer: Sealer) -> None:
        self._pool_address = pool_address
        self._file = file
        self._sealer = sealer
        self._record = Buffer(RECORD_BYTES)
        self._whole = Buffer(PAYLOAD_BYTES)  # joins a record whose bytes are split in the pool
        self._view = memoryview(
            (ctypes.c_ubyte * RECORD_BYTES).from_address(self._record.address)
        ).cast("B")

    def write(self, name: tuple[int, int, int], block: Block, extent: Block) -> Iterator[None]:
        """Write the blob in `block` to `extent`.

        Raises:
            OSError: the write failed; part of the blob may be on the disk.
        """
        blob, room = block.used_extents(), extent.used_extents()
        for record in records(block.nbytes):
            pieces = _cut(blob, record.begin, record.nbytes)
            source = self._address(pieces)
            if len(pieces) > 1:
                gather(self._pool_address, pieces, source)
            label = Label(*name, block.nbytes, record.number)
            self._sealer.seal(label, source, record.nbytes, self._record.address)
            done = 0
            for offset, size in _cut(room, record.place, record.pages):
                self._file.write(offset, self._view[done : done + size])
                done += size
            yield

    def read(self, name: tuple[int, int, int], extent: Block, block: Block) -> Iterator[None]:
        """Read the blob at `extent` into `block`, whose content is undefined until that is done.

        Raises:
            OSError: the blob cannot be read.
            Damaged: it is not the blob that was written there under this name.
        """
        blob, room = block.used_extents(), extent.used_extents()
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
            if len(pieces) > 1:
                scatter(self._pool_address, pieces, target)
            yield

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._record.close()
        self._whole.close()

    # --- pieces in the pool -----------------------------------------------------------------

    def _address(self, pieces: Sequence[Extent]) -> int:
        """Return where a record is contiguous: in the pool, or in `_whole` if it is split there."""
        if len(pieces) == 1:
            return self._pool_address + pieces[0].offset
        return self._whole.address


def _cut(pieces: Sequence[Extent], begin: int, nbytes: int) -> list[Extent]:
    """Return the ranges of the pieces, taken in order, that hold `nbytes` from `begin` on."""
    found = []
    for offset, size in pieces:
        skipped = min(begin, size)
        taken = min(size - skipped, nbytes)
        if taken:
            found.append(Extent(offset + skipped, taken))
        begin, nbytes = begin - skipped, nbytes - taken
    return found
