"""ANCF in NumPy: the reference that tests compare the other backends with, and the last fallback.

It follows FORMAT.md section by section, one tile at a time; it is written for readability, not
speed. Addresses are host memory. No call reads outside `[src, src + nbytes)` or writes outside
`[dst, dst + dst_bytes)`, whatever a blob contains.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CorruptBlob
from . import layout
from .checksum import checksum as checksum_of
from .choose import Sample, choose, take_sample
from .header import Header, read_header
from .layout import Mode
from .options import check_request, check_threads, parse_mode
from .plan import Geometry, Plan, max_encoded_bytes, round_up
from .tiles import TileCoder, pack_planes, unpack_planes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .dtypes import DType

    Bytes = NDArray[np.uint8]
    Elements = NDArray[np.unsignedinteger]

__all__ = [
    "copy_checksum",
    "decode",
    "decode_into",
    "encode",
    "encode_into",
    "encode_planned",
]


def encode_into(
    src: int,
    nbytes: int,
    dtype: DType,
    dst: int,
    dst_bytes: int,
    *,
    mode: str = "auto",
    speed: str = "fast",
    checksum: bool = True,
    policy: str = "adaptive",
    threads: int = 1,
) -> int:
    """Encode `nbytes` bytes at host address `src` to `dst`; return the blob's size.

    `threads` has no effect here. `dst_bytes` must be at least
    `max_encoded_bytes(nbytes, dtype)`. Raises UsageError for arguments that no encoder accepts;
    `dst` is then unchanged.
    """
    check_request(nbytes, dtype, dst_bytes)
    check_threads(threads)
    blob = encode(
        memory(src, nbytes), dtype, mode=mode, speed=speed, checksum=checksum, policy=policy
    )
    memory(dst, blob.size)[:] = blob
    return blob.size


def decode_into(
    blob: int,
    blob_bytes: int,
    dst: int,
    dst_bytes: int,
    *,
    threads: int = 1,
) -> None:
    """Decode the blob of `blob_bytes` bytes at host address `blob` to `dst`.

    `dst_bytes` must be the blob's raw_nbytes. Raises CorruptBlob for a damaged blob; `dst` may then
    hold arbitrary bytes.
    """
    check_threads(threads)
    decode(memory(blob, blob_bytes), memory(dst, dst_bytes))


def copy_checksum(src: int, dst: int, nbytes: int) -> int:
    """Copy `nbytes` bytes from address `src` to `dst`, which must not overlap.

    Returns their 64-bit checksum (FORMAT.md, section 8), which all backends compute alike.
    """
    copy = memory(dst, nbytes)
    copy[:] = memory(src, nbytes)
    return checksum_of(copy)


def memory(address: int, nbytes: int) -> Bytes:
    """Return the host memory at `address` as a writable array that does not own it."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def encode(
    data: Bytes,
    dtype: DType,
    *,
    mode: str = "auto",
    speed: str = "fast",
    checksum: bool = True,
    policy: str = "adaptive",
) -> Bytes:
    """Return the blob of `data` (1-D, contiguous); see `encode_into`."""
    asked = parse_mode(mode, speed, policy)
    value = checksum_of(data) if checksum else None
    elements = np.frombuffer(data.tobytes(), f"<u{dtype.element_bytes}")
    raw = Header(Plan(Mode.RAW), dtype, data.size, 0, value)
    if not elements.size or asked is Mode.RAW:
        return _assemble(raw, [data])
    sample = Sample(take_sample(elements), dtype)
    plan = choose(sample, asked, dense=speed == "dense", policy=policy)
    if plan.mode is Mode.CONSTANT and (elements != plan.fill).any():
        plan = choose(sample, Mode.SPARSE, dense=True, policy=policy, fill=plan.fill)
    header = Header(plan, dtype, data.size, 0, value)
    if header.encoded_nbytes > max_encoded_bytes(data.size, dtype):
        return _assemble(raw, [data])
    return encode_planned(header, elements) if plan.mode else _assemble(raw, [data])


def encode_planned(header: Header, elements: Elements) -> Bytes:
    """Return the blob of `elements` with the plan of `header`; its payload_bytes are ignored.

    The blob is raw if that is smaller, or if the plan cannot represent an element.
    """
    raw = replace(header, plan=Plan(Mode.RAW))
    if header.mode is Mode.CONSTANT:
        return _assemble(header, [])
    if header.mode is Mode.BOOLEAN:
        if elements.max() > 1:
            return _assemble(raw, [elements.view(np.uint8)])
        return _assemble(header, [pack_planes(elements, 1, round_up(elements.size, 128))])
    blocks, records = _encode_tiles(header, elements)
    directory = np.zeros(header.geometry.tiles + 1, "<u8")
    np.cumsum([record.size // layout.RECORD_UNIT for record in records], out=directory[1:])
    payload_bytes = int(directory[-1]) * layout.RECORD_UNIT
    header = replace(header, payload_bytes=payload_bytes)
    limit = max_encoded_bytes(header.raw_nbytes, header.dtype)
    if header.encoded_nbytes > limit or payload_bytes >= layout.MAX_RECORDS_BYTES:
        return _assemble(raw, [elements.view(np.uint8)])
    front = [
        _pad(_apart_dictionary(header.plan), layout.DIRECTORY_ALIGN),
        _pad(directory.astype("<u4").view(np.uint8), layout.DIRECTORY_ALIGN),
    ]
    return _assemble(header, [*front, *blocks, *records])


def _encode_tiles(header: Header, elements: Elements) -> tuple[list[Bytes], list[Bytes]]:
    coder = TileCoder(header.plan, header.dtype)
    blocks, records = [], []
    for start in range(0, elements.size, layout.TILE):
        block, record = coder.encode(elements[start : start + layout.TILE])
        blocks.append(block)
        records.append(_pad(record, layout.RECORD_UNIT))
    return blocks, records


def _assemble(header: Header, parts: list[Bytes]) -> Bytes:
    head = np.frombuffer(header.pack(), np.uint8)
    return np.concatenate([head, *parts])


def _apart_dictionary(plan: Plan) -> Bytes:
    if not plan.dictionary_is_apart:
        return np.empty(0, np.uint8)
    slots = np.zeros(1 << plan.k1, "<u8")
    slots[: len(plan.dictionary)] = plan.dictionary
    return slots.view(np.uint8)


def decode(blob: Bytes, out: Bytes) -> None:
    """Decode `blob` into `out` (1-D, contiguous); see `decode_into`."""
    header = read_header(blob)
    if header.raw_nbytes != out.size:
        raise CorruptBlob(f"the blob holds {header.raw_nbytes} bytes, the output {out.size}")
    out[:] = _decode_elements(header, blob).view(np.uint8)
    if header.checksum is not None and checksum_of(out) != header.checksum:
        raise CorruptBlob("the decoded bytes do not match the blob's checksum")


def _decode_elements(header: Header, blob: Bytes) -> Elements:
    place = header.geometry
    body = blob[place.fixed_offset :]
    if header.mode is Mode.RAW:
        return body
    dtype = np.dtype(f"<u{header.dtype.element_bytes}")
    if header.mode is Mode.CONSTANT:
        return np.full(place.elements, header.plan.fill, dtype)
    if header.mode is Mode.BOOLEAN:
        return unpack_planes(body, 1, 8 * body.size, place.elements).astype(dtype)
    coder = TileCoder(header.plan, header.dtype)
    bounds = _directory(header, blob)
    tiles = [
        coder.decode(*_tile_parts(place, blob, bounds, tile), place.tile_elements(tile))
        for tile in range(place.tiles)
    ]
    return np.concatenate(tiles)


def _directory(header: Header, blob: Bytes) -> list[int]:
    """Return the offset of each record of `blob`, and the end of the last record."""
    place = header.geometry
    start = place.directory_offset
    entries = blob[start : start + 4 * (place.tiles + 1)].tobytes()
    bounds = np.frombuffer(entries, "<u4").astype(np.int64) * layout.RECORD_UNIT
    if bounds[0] or bounds[-1] != header.payload_bytes or (np.diff(bounds) < 0).any():
        raise CorruptBlob("the directory's offsets do not partition the payload")
    return [int(bound) + place.payload_offset for bound in bounds]


def _pad(part: Bytes, multiple: int) -> Bytes:
    padded = np.zeros(round_up(part.size, multiple), np.uint8)
    padded[: part.size] = part
    return padded


def _tile_parts(place: Geometry, blob: Bytes, bounds: list[int], tile: int) -> tuple[Bytes, Bytes]:
    """Return the fixed block and the record of tile number `tile`."""
    start = place.block_offset(tile)
    block = blob[start : start + place.block_bytes(place.tile_elements(tile))]
    return block, blob[bounds[tile] : bounds[tile + 1]]
