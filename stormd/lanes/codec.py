"""INTERIM: raw blobs only, until storm_kernels' encode_into and decode_into are there."""

import ctypes
import struct

from storm_kernels.ancf.dtypes import DType
from storm_kernels.errors import CorruptBlob

from stormd.lanes import blob_bound


def encode_raw(source: int, nbytes: int, dtype: DType, target: int, room: int) -> int:
    assert blob_bound(nbytes) <= room
    ctypes.memmove(target, struct.pack("<4sIQ", b"RAW0", int(dtype), nbytes), 16)
    ctypes.memmove(target + 256, source, nbytes)
    return blob_bound(nbytes)


encode = encode_raw


def mode(blob: int, nbytes: int) -> str:
    return "raw"


def decode(blob: int, blob_bytes: int, target: int, nbytes: int) -> None:
    magic, _, size = struct.unpack("<4sIQ", ctypes.string_at(blob, 16))
    if magic != b"RAW0" or size != nbytes or blob_bytes != blob_bound(nbytes):
        raise CorruptBlob("not a raw blob")
    ctypes.memmove(target, blob + 256, nbytes)
