"""The bytes of a stored ternary tensor: a checked header, the scales, and planes or packed values.

Little-endian, in this order:

    magic "STRN", version 1, form (0 planes, 1 five values per byte), dimensions (u8), flags (u8,
    bit 0: there are scales)
    group (u64: columns per scale, 0 for the whole row), shape (u64 each)
    scales: float32 (rows, groups)
    form 0: plane bit0, then bit1, rows of row_bytes; form 1: all values as one row, packed
    check (u32): CRC-32 of everything before it

A reader checks every value before it uses it; invalid bytes raise CorruptBlob.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from ..errors import CorruptBlob
from .planes import LANE_COLUMNS, Shape, group_count, packed_bytes, row_bytes

__all__ = ["PACKED", "PLANES", "Parts", "join", "split"]

PLANES: Final = 0
PACKED: Final = 1

MAGIC: Final = b"STRN"
VERSION: Final = 1
HAS_SCALE: Final = 1
MAX_DIMENSIONS: Final = 64
MAX_VALUES: Final = 1 << 48  # includes an empty tensor's other dimensions, which NumPy checks

_HEAD: Final = struct.Struct("<4sBBBBQ")
_CHECK: Final = struct.Struct("<I")


@dataclass(frozen=True)
class Parts:
    """The contents of a tensor's bytes; `scale` is None if there are no scales."""

    form: int
    shape: Shape
    group: int
    scale: memoryview | bytes | None
    payload: memoryview | bytes


def join(parts: Parts) -> bytes:
    """Return the bytes of a tensor."""
    flags = 0 if parts.scale is None else HAS_SCALE
    head = _HEAD.pack(MAGIC, VERSION, parts.form, len(parts.shape), flags, parts.group)
    shape = struct.pack(f"<{len(parts.shape)}Q", *parts.shape)
    body = b"".join((head, shape, parts.scale or b"", parts.payload))
    return body + _CHECK.pack(zlib.crc32(body))


def split(data: bytes | bytearray | memoryview) -> Parts:
    """Return the parts of a tensor's bytes.

    Raises:
        CorruptBlob: the bytes are damaged, truncated or not a ternary tensor.
    """
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size + _CHECK.size:
        raise CorruptBlob(f"{len(view)} bytes are too few for a ternary tensor")
    magic, version, form, dimensions, flags, group = _HEAD.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise CorruptBlob(
            f"the bytes begin with {bytes(magic)!r}, version {version}; a ternary tensor begins "
            f"with {MAGIC!r}, version {VERSION}"
        )
    if zlib.crc32(view[: -_CHECK.size]) != _CHECK.unpack_from(view, len(view) - _CHECK.size)[0]:
        raise CorruptBlob(f"the {len(view)} bytes do not match their checksum")
    begin = _HEAD.size + 8 * dimensions
    fits = 1 <= dimensions <= MAX_DIMENSIONS and begin + _CHECK.size <= len(view)
    lies = form > PACKED or flags > HAS_SCALE or group % LANE_COLUMNS or (group and not flags)
    if not fits or lies:
        raise CorruptBlob(
            f"the header contradicts itself: form {form}, {dimensions} dimensions, flags {flags}, "
            f"group {group}, {len(view)} bytes"
        )
    shape = struct.unpack_from(f"<{dimensions}Q", view, _HEAD.size)
    if math.prod(max(1, one) for one in shape) > MAX_VALUES:
        raise CorruptBlob(f"shape {shape} is larger than any tensor")
    scales = 4 * math.prod(shape[:-1]) * group_count(shape[-1], group) if flags else 0
    payload = payload_bytes(shape, form)
    if begin + scales + payload + _CHECK.size != len(view):
        raise CorruptBlob(f"shape {shape} takes another number of bytes than {len(view)}")
    body = view[begin : -_CHECK.size]
    return Parts(form, shape, group, body[:scales] if flags else None, body[scales:])


def payload_bytes(shape: Shape, form: int) -> int:
    """Return the number of bytes of the values in a form."""
    if form == PACKED:
        return packed_bytes(math.prod(shape))
    return 2 * math.prod(shape[:-1]) * row_bytes(shape[-1])
