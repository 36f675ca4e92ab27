"""Moves bytes between a session's memory and blobs in the arena, on the CPU.

Only the given ranges are read and written, even if a client changes its memory meanwhile. The codec
guarantees this: the blob is then garbage and is detected as such. The codec verifies decoded bytes
before they count as restored.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

from storm_kernels import ancf

from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import StoreJob
from stormd.memory.arena import Block
from stormd.memory.host_pool import HostPool, gather, scatter
from stormd.memory.shared_memory import advise_huge_pages

__all__ = ["Buffer", "HostCodec"]

MODE_OFFSET: Final = 6
"""Offset of the mode in an ANCF header; a test compares it with the offset that the codec reads."""


class Buffer:
    """`nbytes` of private memory at `address`, aligned to a page."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge_pages(self._mapping)
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def close(self) -> None:
        """Unmap the memory. Calling it twice is fine."""
        self._mapping.close()


class HostCodec:
    """One worker's stores and restores of up to `chunk_bytes` each. Not thread-safe.

    Its scratch holds a blob whose size is not known yet, or whose block has several extents.
    Scratch pages are allocated when touched, so contiguous raw blobs, which need no scratch, cost
    nothing.
    """

    def __init__(self, pool: HostPool, chunk_bytes: int) -> None:
        self._codec = ancf.host_backend()
        self._pool = pool
        self._blob = Buffer(blob_bound(chunk_bytes))

    def store(self, source: int, job: StoreJob) -> tuple[Block, str]:
        """Encode the bytes at address `source`; return the blob's block and its mode.

        On an error nothing is placed: the job's promise still stands.
        """
        if job.chunk.codec == "raw":
            return self._store_raw(source, job), "raw"
        chunk = job.chunk
        size = self._codec.encode_into(
            source, chunk.nbytes, chunk.dtype, self._blob.address, chunk.bound
        )
        block = job.place(size)
        scatter(self._pool.address, block.used_extents(), self._blob.address)
        return block, _mode(self._blob.address)

    def restore(self, block: Block, destination: int, nbytes: int) -> None:
        """Decode the blob to `nbytes` at address `destination`.

        Raises:
            CorruptBlob: the blob is damaged; the destination may hold anything.
        """
        if block.offset is None:
            gather(self._pool.address, block.used_extents(), self._blob.address)
        self._codec.decode_into(self._address(block), block.nbytes, destination, nbytes)

    def close(self) -> None:
        """Free the scratch. Calling it twice is fine."""
        self._blob.close()

    def _store_raw(self, source: int, job: StoreJob) -> Block:
        """Encode directly into the arena if the block is contiguous: the blob's size is known."""
        block = job.place(job.chunk.bound)
        try:
            self._encode_raw(source, job, block)
        except BaseException:
            job.unplace(block)
            raise
        return block

    def _encode_raw(self, source: int, job: StoreJob, block: Block) -> None:
        chunk, target = job.chunk, self._address(block)
        self._codec.encode_into(source, chunk.nbytes, chunk.dtype, target, block.nbytes, mode="raw")
        if block.offset is None:
            scatter(self._pool.address, block.used_extents(), self._blob.address)

    def _address(self, block: Block) -> int:
        """Return the address of the whole blob: in the arena, or in scratch if split there."""
        return self._blob.address if block.offset is None else self._pool.address + block.offset


def _mode(blob: int) -> str:
    """Return the mode of a blob that was just encoded, without reading the whole header again."""
    return ancf.Mode(ctypes.string_at(blob + MODE_OFFSET, 1)[0]).name.lower()
