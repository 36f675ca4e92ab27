"""Blobs between pool and file: whole or in pieces on either side, and nothing beside them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
from support.failing_file import MemoryFile
from support.spilling import put_bytes, read_bytes

from stormd.memory.arena import Block, Extent, granules
from stormd.memory.extents import PAGE, PAYLOAD_BYTES, RECORD_BYTES, disk_bytes, records
from stormd.spill.records import BlobMover, Damaged
from stormd.spill.sealing import Checksums

POOL_BYTES = 4 * RECORD_BYTES
NAME = (1, 2, 3)
SIZES = (1, PAGE - 16, PAGE - 15, 70_000, PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 2 * RECORD_BYTES)


class _Place:
    """A pool, a file, and what moves blobs between them."""

    def __init__(self) -> None:
        self.pool = ctypes.create_string_buffer(POOL_BYTES)
        self.address = ctypes.addressof(self.pool)
        self.file = MemoryFile(4 * RECORD_BYTES)
        self.mover = BlobMover(self.address, self.file, Checksums())

    def put(self, block: Block, text: bytes) -> None:
        put_bytes(self.address, block, text)

    def get(self, block: Block) -> bytes:
        return read_bytes(self.address, block)

    def write(self, block: Block, extent: Block) -> int:
        return sum(1 for _ in self.mover.write(NAME, block, extent))

    def read(self, extent: Block, block: Block, name: tuple[int, int, int] = NAME) -> int:
        return sum(1 for _ in self.mover.read(name, extent, block))


@pytest.fixture
def place() -> Iterator[_Place]:
    made = _Place()
    yield made
    made.mover.close()


def _block(nbytes: int, offset: int = 0) -> Block:
    return Block((Extent(offset, granules(nbytes)),), nbytes)


def _pieces(nbytes: int, count: int, granule: int, begin: int) -> Block:
    """Return a block in so many pieces, with a gap behind each, the last piece first."""
    room = granules(nbytes, granule)
    each = max(granule, room // count // granule * granule)
    sizes = [each] * (room // each)
    if room % each:
        sizes.append(room % each)
    extents = []
    for size in sizes:
        extents.append(Extent(begin, size))
        begin += size + granule
    return Block(tuple(reversed(extents)), nbytes)


def test_what_was_written_comes_back_elsewhere(place: _Place) -> None:
    for nbytes in SIZES:
        text = os.urandom(nbytes)
        block, extent = _block(nbytes), _block(disk_bytes(nbytes), PAGE)
        place.put(block, text)
        assert place.write(block, extent) == len(list(records(nbytes)))
        other = _block(nbytes, POOL_BYTES // 2)
        place.read(extent, other)
        assert place.get(other) == text


@pytest.mark.parametrize("nbytes", [70_000, PAYLOAD_BYTES + 5000])
def test_in_pieces_on_both_sides(place: _Place, nbytes: int) -> None:
    text = os.urandom(nbytes)
    block = _pieces(nbytes, 7, 256, 256)
    extent = _pieces(disk_bytes(nbytes), 5, PAGE, PAGE)
    place.put(block, text)
    before = place.get(block)
    place.write(block, extent)
    ctypes.memset(place.address, 0xAA, POOL_BYTES)
    place.read(extent, block)
    assert place.get(block) == before == text
    held = {at + i for at, size in block.used_extents() for i in (0, size - 1)}
    for offset, size in block.used_extents():  # what lies beside the pieces is as it was
        for beside in (offset - 1, offset + size):
            assert beside in held or place.pool[beside] == b"\xaa"


def test_an_older_record_in_the_middle_is_found(place: _Place) -> None:
    """A write of which a part came to nothing, where something was before."""
    nbytes = 2 * RECORD_BYTES
    block, extent = _block(nbytes), _block(disk_bytes(nbytes))
    place.write(block, extent)
    older = bytes(place.file.data)
    place.put(block, os.urandom(nbytes))
    for _ in place.mover.write((1, 2, 4), block, extent):
        pass
    place.file.data[RECORD_BYTES : RECORD_BYTES + PAGE] = older[RECORD_BYTES : RECORD_BYTES + PAGE]
    with pytest.raises(Damaged):
        place.read(extent, block, (1, 2, 4))
