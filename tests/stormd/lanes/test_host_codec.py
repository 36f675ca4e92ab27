"""Bytes to blobs and back: in one piece, in several, and when something is wrong."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from storm_kernels.ancf import DType, Mode, read_header
from storm_kernels.errors import CorruptBlob

from stormd.lanes.host_codec import Buffer, HostCodec
from stormd.ledger.chunks import Chunk, blob_bound
from stormd.ledger.events import StoreJob
from stormd.memory.arena import GRANULE, Block, Space
from stormd.memory.host_pool import HostPool

PART = 64 << 10
POOL = 256 << 10


@dataclass
class Made:
    pool: HostPool
    space: Space
    codec: HostCodec
    memory: Buffer

    def store(self, data: bytes, codec: str, dtype: DType = DType.BYTES) -> tuple[Block, str]:
        ctypes.memmove(self.memory.address, data, len(data))
        part = Chunk.of(len(data), dtype.name, codec)
        assert self.space.promise(part.charge)
        job = StoreJob(
            session=1,
            entry=1,
            chunk=part,
            segment=0,
            offset=0,
            sequence=0,
            space=self.space,
        )
        return self.codec.store(self.memory.address, job)

    def restore(self, block: Block, nbytes: int) -> bytes:
        ctypes.memset(self.memory.address, 0xAA, PART)
        self.codec.restore(block, self.memory.address, nbytes)
        return ctypes.string_at(self.memory.address, nbytes)

    def splinter(self) -> None:
        """Leave the space with holes of one granule only."""
        blocks = []
        while self.space.promise(GRANULE):
            blocks.append(self.space.place(GRANULE, GRANULE))
        for block in blocks[::2]:
            self.space.release(block)


@pytest.fixture
def made() -> Iterator[Made]:
    pool = HostPool(POOL)
    space = Space(POOL)
    made = Made(pool, space, HostCodec(pool, PART), Buffer(PART))
    yield made
    made.codec.close()
    made.memory.close()
    pool.close()


@pytest.mark.parametrize("splintered", [False, True])
@pytest.mark.parametrize("codec", ["raw", "ancf"])
def test_bytes_come_back(made: Made, codec: str, splintered: bool) -> None:
    if splintered:
        made.splinter()
    for nbytes in (1, 255, 4097, PART):
        data = os.urandom(nbytes)
        block, mode = made.store(data, codec)
        assert mode in {"raw", "constant" if nbytes == 1 and codec == "ancf" else "raw"}
        assert block.nbytes <= blob_bound(nbytes)
        assert (block.offset is None) == (splintered and block.nbytes > GRANULE)
        assert made.restore(block, nbytes) == data
        with pytest.raises(CorruptBlob):
            made.restore(block, nbytes - 1)
        made.space.release(block)


def test_the_mode_is_what_the_codec_wrote(made: Made) -> None:
    block, mode = made.store(bytes(4096), "ancf", DType.BFLOAT16)
    blob = ctypes.string_at(made.pool.address + block.offset, block.nbytes)
    assert read_header(blob).mode is Mode[mode.upper()]
    assert mode == "constant"
    assert block.nbytes < 4096


@pytest.mark.parametrize("splintered", [False, True])
def test_damage_is_found(made: Made, splintered: bool) -> None:
    if splintered:
        made.splinter()
    block, _ = made.store(os.urandom(10_000), "raw")
    damaged = made.pool.address + block.used_extents()[-1].offset
    ctypes.memset(damaged, ctypes.string_at(damaged, 1)[0] ^ 1, 1)
    with pytest.raises(CorruptBlob):
        made.restore(block, 10_000)


@pytest.mark.parametrize("codec", ["raw", "ancf"])
def test_a_store_that_fails_leaves_its_promise(
    made: Made, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def encode_into(self, *_: object, **__: object) -> int:
            raise MemoryError("no scratch")

    monkeypatch.setattr(made.codec, "_codec", Broken())
    with pytest.raises(MemoryError):
        made.store(bytes(1000), codec)
    assert (made.space.use().used, made.space.use().promised) == (0, 1280)
    made.space.assert_invariants()
