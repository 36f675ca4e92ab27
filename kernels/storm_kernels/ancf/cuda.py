"""ANCF on a CUDA device: the same bytes as reference.py writes, without the host in the way.

`CudaCodec` launches on the caller's stream and neither allocates nor synchronises: output,
scratch and the places for size and status are the caller's. The kernels are the `.cu` files
beside this module, compiled by CuPy at first use for the device's own architecture and kept in
CuPy's cache on disk. CuPy and torch are loaded only when something here is called.
"""

from __future__ import annotations

import hashlib
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import BackendUnavailable, CorruptBlob, UsageError
from .dtypes import DType
from .layout import TILE, Mode
from .options import POLICIES, check_request, parse_mode
from .plan import max_encoded_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["CudaCodec", "decode_device", "encode_device", "probe"]

BLOCK_THREADS: Final = 512
CHOOSE_THREADS: Final = 1024
BEGIN_THREADS: Final = 32
PLAN_BYTES: Final = 512 + 4096 + 128  # kPlanBytes + kValuesBytes + kWorkBytes of ancf_format.cuh
MAX_UNIT_TILES: Final = 4
AUTO_MODE: Final = 255
BLOB_ALIGN: Final = 16  # bytes, of blobs and scratch
RESULT_WORDS: Final = 3  # u64: the blob's bytes, status, mode

_SOURCES = Path(__file__).parent
_STATUS = {
    1: "the header is damaged or does not fit the sizes given",
    2: "a record contradicts its tile or the directory",
    3: "the decoded bytes do not match the blob's checksum",
}


def probe() -> tuple[bool, str]:
    """Return whether a device can be used, and its name or why not."""
    try:
        cupy = _cupy()
        count = cupy.cuda.runtime.getDeviceCount()
        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except BackendUnavailable as missing:
        return False, str(missing)
    except Exception as error:  # noqa: BLE001 (CuPy's own error types need CuPy to name them)
        return False, f"no usable CUDA device: {error}"
    name = properties["name"].decode()
    return True, f"{count} x {name}, sm_{properties['major']}{properties['minor']}"


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as missing:
        raise BackendUnavailable(
            f"CuPy is not installed ({missing}); pip install cupy-cuda13x"
        ) from missing
    return cupy


class CudaCodec:
    """Encoder and decoder of one device, for one thread at a time or many.

    `blocks` bounds how many thread blocks of 512 a launch takes (0: as many as fit), and with it
    how much of the device the codec may use beside other work. Raises BackendUnavailable where
    CuPy is missing.
    """

    def __init__(self, device: int = 0, *, blocks: int = 0) -> None:
        self._device = device
        self._cupy = _cupy()
        self._lock = threading.Lock()  # protects _kernels
        self._kernels: dict[tuple[str, int, int], _Kernel] = {}
        attributes = self._cupy.cuda.Device(device).attributes
        self._blocks = blocks or 2 * int(attributes["MultiProcessorCount"])

    def scratch_bytes(self, nbytes: int, dtype: DType) -> int:
        """Return the bytes of scratch that one call on `nbytes` original bytes needs."""
        tiles = -(-nbytes // dtype.element_bytes // TILE)
        return PLAN_BYTES + 8 * (tiles + 1)

    def prepare(self, dtype: DType) -> None:
        """Compile what `dtype` needs, which takes seconds where CuPy's cache has it not."""
        self._kernel("ancf_choose", "ancf_choose", dtype)
        for pipeline in _PIPELINES:
            self._kernel("ancf_encode", f"ancf_encode_{pipeline}", dtype)
            self._kernel("ancf_decode", f"ancf_decode_{pipeline}", dtype)

    def encode_async(  # noqa: PLR0917 (addresses and sizes, in pairs, as the daemon's lane has them)
        self,
        src: int,
        nbytes: int,
        dtype: DType,
        dst: int,
        dst_bytes: int,
        scratch: int,
        result: int,
        stream: int,
        *,
        mode: str = "auto",
        speed: str = "fast",
        checksum: bool = True,
        policy: str = "adaptive",
    ) -> None:
        """Encode `nbytes` bytes at device address `src` to `dst`, in order on `stream`.

        Afterwards three u64 at `result` (device or mapped host memory) hold the blob's bytes,
        0, and its mode. `dst` and `scratch` must be 16-byte aligned, of at least
        `max_encoded_bytes` and `scratch_bytes`; both may be reused once the stream has passed.
        Raises UsageError before anything is launched.
        """
        asked = parse_mode(mode, speed, policy)
        check_request(nbytes, dtype, dst_bytes)
        _check_aligned(dst=dst, scratch=scratch)
        tiles = -(-nbytes // dtype.element_bytes // TILE)
        choose = self._kernel("ancf_choose", "ancf_choose", dtype)
        copy = self._kernel("ancf_encode", "ancf_encode_raw", dtype)
        clear_words = (self.scratch_bytes(nbytes, dtype) - 512 - 4096) // 4
        clearing = 1 + min(32, 1 + clear_words // (8 * CHOOSE_THREADS))
        teams = BLOCK_THREADS // (64 * dtype.element_bytes)
        unit_tiles = max(1, min(MAX_UNIT_TILES, tiles // (4 * self._blocks * teams)))
        blocks = max(1, min(self._blocks, -(-tiles // (teams * unit_tiles))))
        number = AUTO_MODE if asked is None else int(asked)
        options = (int(dtype), number, int(speed == "dense"), int(checksum))
        with self._cupy.cuda.Device(self._device):
            choose.launch(
                1 + clearing,
                CHOOSE_THREADS,
                stream,
                src,
                nbytes,
                scratch,
                U32(clear_words),
                *map(U32, options),
            )
            if asked in (Mode.TERNARY, Mode.VALUES):
                values = self._kernel("ancf_values", "ancf_values", dtype)
                values.launch(
                    1, CHOOSE_THREADS, stream, src, scratch, U32(asked), U32(POLICIES.index(policy))
                )
            for kind in _pipelines(
                asked, speed, dtype
            ):  # one of them finds that the plan is its own
                encode = self._kernel("ancf_encode", f"ancf_encode_{kind}", dtype)
                encode.launch(
                    blocks, BLOCK_THREADS, stream, src, dst, scratch, result, U32(unit_tiles)
                )
            copy.launch(blocks, BLOCK_THREADS, stream, src, dst, scratch)

    def decode_async(  # noqa: PLR0917 (as encode_async)
        self,
        blob: int,
        blob_bytes: int,
        dst: int,
        dst_bytes: int,
        scratch: int,
        status: int,
        stream: int,
        *,
        dtype: DType | None = None,
    ) -> None:
        """Decode the blob at device address `blob` to `dst`, in order on `stream`.

        Afterwards the u64 at `status` (device or mapped host memory) is 0, or what `explain`
        puts in words; `dst` may then hold anything, nothing outside it was touched. `blob` and
        `scratch` must be 16-byte aligned. `dtype` is what the blob holds; where the caller does
        not know it, kernels for all types are launched, of which one works.
        """
        _check_aligned(blob=blob, scratch=scratch)
        kinds = _KINDS if dtype is None else ((dtype),)
        begin = self._kernel("ancf_decode", "ancf_decode_begin", kinds[0])
        with self._cupy.cuda.Device(self._device):
            begin.launch(1, BEGIN_THREADS, stream, blob, blob_bytes, dst_bytes, scratch, status)
            for kind in kinds:
                teams = BLOCK_THREADS // (64 * kind.element_bytes)
                tiles = -(-dst_bytes // kind.element_bytes // TILE)
                blocks = max(1, min(self._blocks, -(-tiles // teams)))
                for pipeline in _PIPELINES:
                    decode = self._kernel("ancf_decode", f"ancf_decode_{pipeline}", kind)
                    decode.launch(blocks, BLOCK_THREADS, stream, blob, dst, scratch, status)

    def explain(self, status: int) -> str:
        """Return what a status other than 0 means."""
        return _STATUS.get(status, f"the decoder left status {status}")

    def _kernel(self, source: str, name: str, dtype: DType) -> _Kernel:
        key = (name, dtype.element_bytes, dtype.mantissa_bits)
        with self._lock:
            found = self._kernels.get(key)
        if found is None:  # made without the lock: compiling takes seconds, several may at once
            made = _Kernel(self._device, source, name, dtype)
            with self._lock:
                found = self._kernels.setdefault(key, made)
        return found


# One element type for each compiled variant.
_KINDS: Final = (
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.FLOAT32,
    DType.UINT8,
    DType.FLOAT8_E5M2,
    DType.FLOAT64,
)


class U32(int):
    """A kernel argument of 32 bits; a plain int is one of 64."""


class _StreamHandle:
    """A stream of the caller's, by the protocol that CUDA libraries for Python share."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the handle."""
        return 0, self._handle


@lru_cache(maxsize=256)
def _stream(handle: int) -> Any:
    return _cupy().cuda.Stream.from_external(_StreamHandle(handle))


class _Kernel:
    """One compiled kernel."""

    def __init__(self, device: int, source: str, name: str, dtype: DType) -> None:
        cupy = _cupy()
        options = (
            "-std=c++17",
            f"-I{_SOURCES}",
            f"-DANCF_WIDTH={dtype.element_bytes}",
            f"-DANCF_MANTISSA={dtype.mantissa_bits}",
            f"-DANCF_SOURCES=0x{_source_digest()}",  # CuPy's cache does not look into headers
        )
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=f'#include "{source}.cu"\n', options=options)
            function = module.get_function(name)
            self._shared_bytes = 0
            if name in _SHARED_SYMBOL:
                self._shared_bytes = _read_u32(cupy, module, _SHARED_SYMBOL[name])
                function.max_dynamic_shared_size_bytes = self._shared_bytes
            self._launch = function.kernel

    def launch(self, blocks: int, threads: int, stream: int, *arguments: int) -> None:
        """Put the kernel on the stream with that handle."""
        packed = tuple(
            np.uint32(value) if isinstance(value, U32) else np.uint64(value) for value in arguments
        )
        self._launch(
            (blocks,),
            (threads,),
            packed,
            self._shared_bytes,
            _stream(stream),
        )


_PIPELINES: Final = ("fast", "dense", "bitmap", "whole")  # Pipeline of ancf_format.cuh

_SHARED_SYMBOL: Final = {
    "ancf_choose": "ancf_choose_shared_bytes",
    "ancf_values": "ancf_values_shared_bytes",
    **{f"ancf_encode_{kind}": "ancf_encode_shared_bytes" for kind in _PIPELINES},
    **{f"ancf_decode_{kind}": "ancf_decode_shared_bytes" for kind in _PIPELINES},
}


def _pipelines(asked: Mode | None, speed: str, dtype: DType) -> tuple[str, ...]:
    """Return the kernels of which one encodes, whatever plan comes out of the sample."""
    may_be_fast = speed == "fast" and (asked is None or asked in (Mode.WINDOW, Mode.TRUNCATED))
    may_drop = dtype.is_float and dtype.element_bytes >= 4
    may_be_dense = asked is Mode.TRUNCATED or (
        asked in (None, Mode.WINDOW) and (speed == "dense" or (asked is None and may_drop))
    )
    if asked is None and not dtype.is_float:
        may_be_fast = may_be_dense = False
    may_have_bitmap = asked in (None, Mode.SPARSE, Mode.CONSTANT)
    wanted = (may_be_fast, may_be_dense, may_have_bitmap, True)
    return tuple(kind for kind, may in zip(_PIPELINES, wanted, strict=True) if may)


def _read_u32(cupy: Any, module: Any, symbol: str) -> int:
    return int(cupy.ndarray(1, cupy.uint32, module.get_global(symbol)).get()[0])


@lru_cache(maxsize=1)
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.cu*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _check_aligned(**addresses: int) -> None:
    for name, address in addresses.items():
        if address % BLOB_ALIGN:
            raise UsageError(f"{name} at {address:#x} is not aligned to {BLOB_ALIGN} bytes")


def encode_device(
    src: int,
    nbytes: int,
    dtype: DType,
    device: int,
    *,
    mode: str = "auto",
    speed: str = "fast",
    checksum: bool = True,
    policy: str = "adaptive",
) -> torch.Tensor:
    """Return the blob of `nbytes` bytes at device address `src`, as uint8 on that device.

    Runs on torch's current stream and waits for it, to learn the blob's size.
    """
    import torch

    codec, where = _codec(device), torch.device("cuda", device)
    room = max_encoded_bytes(nbytes, dtype)
    dst = torch.empty(room, dtype=torch.uint8, device=where)
    scratch = torch.empty(codec.scratch_bytes(nbytes, dtype), dtype=torch.uint8, device=where)
    result = torch.empty(RESULT_WORDS, dtype=torch.int64, device=where)
    stream = torch.cuda.current_stream(where).cuda_stream
    codec.encode_async(
        src, nbytes, dtype, dst.data_ptr(), room, scratch.data_ptr(), result.data_ptr(), stream,
        mode=mode, speed=speed, checksum=checksum, policy=policy,
    )  # fmt: skip
    return dst[: int(result[0])].clone()


def decode_device(blob: torch.Tensor, dst: int, dst_bytes: int) -> None:
    """Decode `blob` (uint8 on a CUDA device) to device address `dst`; raise CorruptBlob.

    Runs on torch's current stream and waits for it.
    """
    import torch

    device = blob.get_device()
    codec, where = _codec(device), torch.device("cuda", device)
    data = blob if blob.data_ptr() % BLOB_ALIGN == 0 else blob.clone()
    scratch = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=where)
    status = torch.full((1,), -1, dtype=torch.int64, device=where)
    stream = torch.cuda.current_stream(where).cuda_stream
    dtype = _dtype_in(data)
    codec.decode_async(
        data.data_ptr(), data.numel(), dst, dst_bytes, scratch.data_ptr(), status.data_ptr(),
        stream, dtype=dtype,
    )  # fmt: skip
    if outcome := int(status[0]):
        raise CorruptBlob(codec.explain(outcome))


def _dtype_in(blob: torch.Tensor) -> DType | None:
    """The type that a header names, None where it names none."""
    number = int(blob[7]) if blob.numel() > 7 else -1
    return DType(number) if number in DType.__members__.values() else None


@lru_cache(maxsize=16)
def _codec(device: int) -> CudaCodec:
    return CudaCodec(device)
