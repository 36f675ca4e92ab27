"""ANCF by the C library: the same bytes as reference.py writes, at the speed of memory.

Addresses are host memory of any alignment. No call reads outside `[src, src + nbytes)` or writes
outside `[dst, dst + dst_bytes)`, whatever a blob contains. This also holds if another process
changes `src` or the blob during the call. The result is then garbage, which the checksum detects,
and nothing else is affected. Each call releases the interpreter lock.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NoReturn

from ..errors import BackendUnavailable, CorruptBlob, UsageError
from ..native import InstructionSet, Status, available_sets, load, probe
from .header import read_header
from .options import POLICIES, check_request, check_threads, parse_mode
from .reference import memory

if TYPE_CHECKING:
    from .dtypes import DType

__all__ = [
    "CpuCodec",
    "Options",
    "copy_checksum",
    "decode_into",
    "encode_into",
    "library",
    "probe",
]

AUTO = -1  # ANCF_AUTO in format.h


class Options(ctypes.Structure):
    """`struct storm_ancf_options` in ancf.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("mode", "dense", "checksum", "policy", "threads", "isa")
    )


@cache
def library() -> ctypes.CDLL:
    """Return the library with the functions of ancf.h declared; raises BackendUnavailable."""
    loaded = load()
    address, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    options = ctypes.POINTER(Options)
    loaded.storm_ancf_encode.argtypes = [address, size, number, address, size, options]
    loaded.storm_ancf_encode.restype = ctypes.c_int64
    loaded.storm_ancf_decode.argtypes = [address, size, address, size, options]
    loaded.storm_ancf_checksum.argtypes = [address, size, number]
    loaded.storm_ancf_checksum.restype = ctypes.c_uint64
    loaded.storm_ancf_copy_checksum.argtypes = [address, address, size, number]
    loaded.storm_ancf_copy_checksum.restype = ctypes.c_uint64
    return loaded


@dataclass(frozen=True)
class CpuCodec:
    """The codec with a fixed instruction set, which never changes the bytes.

    Methods raise BackendUnavailable when the library or the instruction set is missing.
    """

    instruction_set: InstructionSet = InstructionSet.BEST

    def encode_into(
        self,
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
        """Encode `nbytes` bytes at address `src` to `dst`; return the blob's size.

        `dst_bytes` must be at least `max_encoded_bytes(nbytes, dtype)`, and the two ranges must
        not overlap. The call uses at most `threads` threads, fewer for small tensors. Raises
        UsageError for arguments that no encoder accepts; `dst` is then unchanged.
        """
        asked = parse_mode(mode, speed, policy)
        check_request(nbytes, dtype, dst_bytes)
        check_threads(threads)
        options = Options(
            mode=AUTO if asked is None else asked,
            dense=speed == "dense",
            checksum=checksum,
            policy=POLICIES.index(policy),
            threads=threads,
            isa=self.instruction_set,
        )
        size: int = library().storm_ancf_encode(
            src, nbytes, dtype, dst, dst_bytes, ctypes.byref(options)
        )
        if size < 0:
            self._fail(size, f"encoding {nbytes} bytes of {dtype.name.lower()}")
        return size

    def decode_into(
        self, blob: int, blob_bytes: int, dst: int, dst_bytes: int, *, threads: int = 1
    ) -> None:
        """Decode the blob of `blob_bytes` bytes at address `blob` to `dst`.

        `dst_bytes` must be the blob's raw_nbytes. Raises CorruptBlob for a damaged blob; `dst` may
        then hold arbitrary bytes.
        """
        check_threads(threads)
        options = Options(threads=threads, isa=self.instruction_set)
        status = library().storm_ancf_decode(
            blob, blob_bytes, dst, dst_bytes, ctypes.byref(options)
        )
        if status == Status.CORRUPT:
            _explain_damage(blob, blob_bytes, dst_bytes)
        if status < 0:
            self._fail(status, f"decoding {blob_bytes} bytes")

    def copy_checksum(self, src: int, dst: int, nbytes: int) -> int:
        """Copy `nbytes` bytes from `src` to `dst`, which must not overlap; return the checksum."""
        found: int = library().storm_ancf_copy_checksum(dst, src, nbytes, self.instruction_set)
        return found

    def _fail(self, status: int, doing: str) -> None:
        if status == Status.NO_MEMORY:
            raise MemoryError(f"{doing}: no memory for a scratch buffer; use fewer threads")
        if status == Status.UNSUPPORTED:
            raise BackendUnavailable(
                f"{self.instruction_set.name.lower()} is missing here; "
                f"there are {', '.join(one.name.lower() for one in available_sets())}"
            )
        raise UsageError(f"{doing}: the library refuses the arguments ({Status(status).name})")


def _explain_damage(blob: int, blob_bytes: int, dst_bytes: int) -> NoReturn:
    """Raise CorruptBlob with a message for the damage that the library found."""
    header = read_header(memory(blob, blob_bytes))
    if header.raw_nbytes != dst_bytes:
        raise CorruptBlob(f"the blob holds {header.raw_nbytes} bytes, the output {dst_bytes}")
    raise CorruptBlob(
        f"the {header.mode.name.lower()} blob of {blob_bytes} bytes has a record that contradicts "
        "its tile, or its bytes do not match its checksum"
    )


_DEFAULT = CpuCodec()
encode_into = _DEFAULT.encode_into
decode_into = _DEFAULT.decode_into
copy_checksum = _DEFAULT.copy_checksum
