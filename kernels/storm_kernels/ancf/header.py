"""The 256 bytes at the start of every blob.

`Header.pack` and `read_header` are inverses. `read_header` rejects every header that no encoder
writes, so the code can rely on the sizes and offsets of a `Header`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CorruptBlob
from . import layout
from .checksum import header_check
from .dtypes import DType
from .layout import Mode
from .plan import Geometry, Plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HEAD_BYTES", "Header", "read_header"]

HEAD_BYTES = layout.HEADER_BYTES + (8 << 9)  # the header and the longest dictionary
_FIELDS = struct.Struct(f"<4sH10BQQQQIIQQQ{layout.WINDOW_SLOTS}H")
_CHECK = struct.Struct("<Q")
_CHECK_AT = layout.HEADER_BYTES - _CHECK.size


@dataclass(frozen=True)
class Header:
    """The fields of a blob's header. Sizes are bytes; `checksum` is None if the blob has none."""

    plan: Plan
    dtype: DType
    raw_nbytes: int
    payload_bytes: int
    checksum: int | None

    @property
    def mode(self) -> Mode:
        """How the tiles are coded."""
        return self.plan.mode

    @property
    def geometry(self) -> Geometry:
        """The offsets of the blob's sections."""
        return Geometry(self.plan, self.dtype, self.raw_nbytes)

    @property
    def encoded_nbytes(self) -> int:
        """The whole blob's size."""
        return self.geometry.payload_offset + self.payload_bytes

    def pack(self) -> bytes:
        """Return the header's 256 bytes."""
        plan, place = self.plan, self.geometry
        window = () if plan.dictionary_is_apart else plan.dictionary
        fields = _FIELDS.pack(
            layout.MAGIC,
            layout.VERSION,
            plan.mode,
            self.dtype,
            0 if self.checksum is None else layout.FLAG_CHECKSUM,
            plan.bitmap,
            plan.rotate,
            plan.drop,
            plan.residue_bits,
            plan.k1,
            plan.k2,
            plan.escape_bytes(self.dtype),
            self.raw_nbytes,
            self.encoded_nbytes,
            self.checksum or 0,
            plan.fill,
            place.tiles,
            len(plan.dictionary),
            place.fixed_offset,
            place.payload_offset,
            self.payload_bytes,
            *window,
            *(0,) * (layout.WINDOW_SLOTS - len(window)),
        )
        head = fields.ljust(_CHECK_AT, b"\0")
        return head + _CHECK.pack(header_check(head))


def read_header(
    view: bytes | bytearray | memoryview | NDArray[np.uint8], blob_bytes: int | None = None
) -> Header:
    """Return the header of a blob of `blob_bytes` bytes (default: the size of `view`).

    `view` holds the whole blob or at least its first `HEAD_BYTES` bytes. Raises CorruptBlob if the
    header is damaged, has another version, or describes a blob of another size. The function does
    not check the records or the checksum.
    """
    data = memoryview(view).cast("B")  # type: ignore[arg-type]  # typeshed: ndarray has no buffer in 3.11
    if len(data) < layout.HEADER_BYTES:
        raise CorruptBlob(f"{len(data)} bytes are too few for a header of {layout.HEADER_BYTES}")
    head = bytes(data[: layout.HEADER_BYTES])
    _check_identity(head)
    header = _parse(head, data)
    size = len(data) if blob_bytes is None else blob_bytes
    if header.encoded_nbytes != size:  # also ensures that every number below fits its field
        raise CorruptBlob(f"the header describes {header.encoded_nbytes} bytes, got {size}")
    if header.pack() != head:
        raise CorruptBlob("the header's sizes, offsets or padding contradict its mode and dtype")
    return header


def _check_identity(head: bytes) -> None:
    magic, version = struct.unpack_from("<4sH", head)
    if magic != layout.MAGIC:
        raise CorruptBlob(f"not an ANCF blob: it starts with {magic!r}, not {layout.MAGIC!r}")
    if version != layout.VERSION:
        raise CorruptBlob(f"ANCF version {version} is unknown; this code reads {layout.VERSION}")
    if _CHECK.unpack_from(head, _CHECK_AT)[0] != header_check(head[:_CHECK_AT]):
        raise CorruptBlob("the header's check does not match its bytes")


def _parse(head: bytes, data: memoryview) -> Header:
    (_, _, mode, dtype, flags, bitmap, rotate, drop, residue_bits, k1, k2, _,
     raw_nbytes, _, checksum, fill, _, dict_count, _, _, payload_bytes, *window,
     ) = _FIELDS.unpack_from(head)  # fmt: skip
    if mode not in Mode.__members__.values() or dtype not in DType.__members__.values():
        raise CorruptBlob(f"mode {mode} or dtype {dtype} is unknown")
    bare = Plan(Mode(mode), bitmap, rotate, drop, residue_bits, k1, k2, fill)
    if problem := bare.problem(DType(dtype)):
        raise CorruptBlob(f"no encoder writes {problem}")
    if fill >> DType(dtype).width:
        raise CorruptBlob(f"fill value {fill:#x} is wider than {DType(dtype).name}")
    if payload_bytes and not bare.has_tiles:
        raise CorruptBlob(f"{payload_bytes} bytes of records in mode {bare.mode.name.lower()}")
    if raw_nbytes % DType(dtype).element_bytes:
        raise CorruptBlob(f"{raw_nbytes} bytes are no whole number of {DType(dtype).name} elements")
    entries = _dictionary(bare, dict_count, window, data)
    plan = Plan(bare.mode, bitmap, rotate, drop, residue_bits, k1, k2, fill, entries)
    return Header(
        plan, DType(dtype), raw_nbytes, payload_bytes,
        checksum if flags & layout.FLAG_CHECKSUM else None,
    )  # fmt: skip


def _dictionary(plan: Plan, count: int, window: list[int], data: memoryview) -> tuple[int, ...]:
    if count > sum(plan.slots):
        raise CorruptBlob(f"{count} dictionary entries for {sum(plan.slots)} slots")
    if not plan.dictionary_is_apart:
        return tuple(window[:count])
    end = layout.HEADER_BYTES + 8 * count
    if len(data) < end:
        raise CorruptBlob(f"{len(data)} bytes are too few for a dictionary of {count} entries")
    return struct.unpack(f"<{count}Q", data[layout.HEADER_BYTES : end])
