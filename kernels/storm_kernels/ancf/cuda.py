"""ANCF on a CUDA device: the same bytes as reference.py writes, without work on the host.

`CudaCodec` launches on the caller's stream and neither allocates nor synchronises. The caller
provides the memory for output, scratch, size and status. The kernels are the `.cu` files in
csrc/cuda. CuPy compiles them at first use for the device's architecture and keeps them in its cache
on disk. CuPy and torch are loaded only when a function here is called.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import chain, product
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ..cuda_compiler import load_cupy, probe
from ..errors import CorruptBlob, UsageError
from .cuda_launches import (
    BEGIN_THREADS,
    BLOCK_THREADS,
    CHECK_ARGUMENTS,
    DECODE_ARGUMENTS,
    ENCODE_ARGUMENTS,
    PIPELINES,
    PLAN_BYTES,
    TAKEN,
    decode_kernels,
    decoding,
    encode_kernels,
    encoding,
    scratch_bytes,
)
from .cuda_modules import Modules, wanted
from .dtypes import DType
from .layout import Mode
from .options import SPEEDS
from .plan import max_encoded_bytes

if TYPE_CHECKING:
    import torch

    from ..cuda_driver.launch import Function

__all__ = ["CudaCodec", "decode_device", "encode_device", "probe"]

BLOB_ALIGN: Final = 16  # alignment of blobs and scratch, in bytes
RESULT_WORDS: Final = 3  # u64: the blob's bytes, status, mode

EARLY_CAPABILITY: Final = 90
"""From this compute capability on, a kernel can begin while the previous one still runs."""

MODES: Final = tuple(mode.name.lower() for mode in Mode)

_STATUS = {
    1: "the header is damaged or does not fit the sizes given",
    2: "a record contradicts its tile or the directory",
    3: "the decoded bytes do not match the blob's checksum",
    4: "the blob is of another element type or pipeline than the caller named",
}


class CudaCodec:
    """Encoder and decoder of one device; several threads may use it at once.

    `blocks` is the maximum number of thread blocks, of at most 512 threads, per launch (0: two per
    multiprocessor). So it limits how much of the device the codec uses beside other work. Raises
    BackendUnavailable if CuPy or the CUDA bindings are missing.
    """

    def __init__(self, device: int = 0, *, blocks: int = 0) -> None:
        self._cupy = load_cupy()
        from ..cuda_driver import launch

        self._driver = launch
        self._device = device
        self._modules = Modules(device)
        # A cache of the modules' functions; any thread may add to it.
        self._functions: dict[tuple[str, DType], Function] = {}
        self._threads = threading.local()  # each has its own arguments
        with self._cupy.cuda.Device(device) as entered:
            self._cupy.cuda.runtime.free(0)  # creates the device's context if there is none yet
            self._context = launch.current_context()
            self._blocks = blocks or 2 * int(entered.attributes["MultiProcessorCount"])
            may_be_early = int(entered.compute_capability) >= EARLY_CAPABILITY
        # Launch functions for the first kernel of a call, and for those after it.
        self._launch = launch.launch
        self._launch_next = launch.launch_early if may_be_early else launch.launch

    def scratch_bytes(self, nbytes: int, dtype: DType) -> int:
        """Return the bytes of scratch that one call on `nbytes` original bytes needs."""
        return scratch_bytes(nbytes, dtype)

    def prepare(self, dtype: DType) -> None:
        """Compile all kernels for `dtype`; this takes seconds if CuPy's cache lacks them."""
        for _ in self.prepare_each([dtype], modes=("auto", *MODES), speeds=SPEEDS):
            pass

    def prepare_each(
        self,
        dtypes: Iterable[DType],
        *,
        modes: Iterable[str] = ("auto",),
        speeds: Iterable[str] = ("fast",),
    ) -> Iterator[DType]:
        """Compile for all `dtypes` in parallel, and yield each in turn when it is ready.

        A ready dtype can be encoded in these modes at these speeds, and the blobs decoded. Other
        kernels are compiled on first use. Once the iterator is closed, no further compilation
        starts.
        """
        ways = list(product(modes, speeds))
        names = {dtype: _kernels(dtype, ways) for dtype in dtypes}
        modules = (wanted(name, dtype) for dtype in names for name in names[dtype])
        preparation = self._modules.prepare(modules)
        try:
            for dtype, kernels in names.items():
                for name in kernels:
                    self._function(name, dtype)
                yield dtype
        finally:
            preparation.end()

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
        likely: str | None = None,
    ) -> None:
        """Encode `nbytes` bytes at device address `src` to `dst`, in order on `stream`.

        Afterwards three u64 at `result` (device or mapped host memory) hold the blob's bytes, 0,
        and its mode. `dst` and `scratch` must be 16-byte aligned and have at least
        `max_encoded_bytes` and `scratch_bytes` bytes. Both may be reused once the stream has passed
        the encoding. With `likely` only the encoder of that pipeline is launched; if the device
        chooses another pipeline, the blob is raw. Raises UsageError before any launch.
        """
        plan = encoding(nbytes, dtype, mode, speed, policy, self._blocks, likely)
        if dst_bytes < plan.room:
            raise UsageError(f"output of {dst_bytes} bytes, max_encoded_bytes says {plan.room}")
        _check_aligned(dst=dst, scratch=scratch)
        arguments = self._arguments()
        arguments.encode.pack(
            src, nbytes, dst, scratch, result, plan.clear_words, dtype, plan.mode, plan.is_dense,
            checksum, plan.unit_tiles, plan.policy, plan.launched,
        )  # fmt: skip
        launch = self._launch
        with self._entered():
            for kernel, blocks, threads in plan.launches:
                function = self._function(kernel, dtype)
                launch(function, blocks, threads, stream, arguments.taken[kernel])
                launch = self._launch_next

    @property
    def check_blocks(self) -> int:
        """The number of words that `check_async` writes for each span."""
        return self._blocks

    def check_async(self, spans: int, count: int, sums: int, stream: int) -> None:
        """Compute partial checksums of `count` spans of bytes, in order on `stream`.

        `spans` and `sums` are device or mapped host memory. Each span is two u64 at `spans`: its
        device address and its bytes. Afterwards `check_blocks` u64 per span at `sums` hold partial
        sums, from which `checksum.from_sums` computes the checksum. The memory may be reused once
        the stream has passed the kernel.
        """
        arguments = self._arguments()
        arguments.check.pack(spans, sums, count)
        with self._entered():
            function = self._function("ancf_check", DType.BYTES)
            taken = arguments.taken["ancf_check"]
            self._launch(function, self._blocks, BLOCK_THREADS, stream, taken)

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
        pipeline: str | None = None,
    ) -> None:
        """Decode the blob at device address `blob` to `dst`, in order on `stream`.

        Afterwards the u64 at `status` (device or mapped host memory) is 0, or an error for
        `explain`; `dst` may then hold arbitrary bytes, and nothing outside it was written. `blob`
        and `scratch` must be 16-byte aligned. `dtype` and `pipeline` are those of the blob's header
        (`blob_kind`). Without them, kernels for all dtypes and pipelines are launched, and one of
        them decodes. If they are wrong, no kernel decodes, and the status says so.
        """
        _check_aligned(blob=blob, scratch=scratch)
        kinds = _KINDS if dtype is None else (dtype,)
        pipelines = PIPELINES if pipeline is None else (pipeline,)
        arguments = self._arguments()
        arguments.decode.pack(blob, blob_bytes, dst, dst_bytes, scratch, status)
        taken = arguments.taken
        with self._entered():
            begin = self._function("ancf_decode_begin", kinds[0])
            self._launch(begin, 1, BEGIN_THREADS, stream, taken["ancf_decode_begin"])
            for kind, name in product(kinds, pipelines):
                kernel, blocks, threads = decoding(dst_bytes, kind, name, self._blocks)
                function = self._function(kernel, kind)
                self._launch_next(function, blocks, threads, stream, taken[kernel])

    def explain(self, status: int) -> str:
        """Return the meaning of a status other than 0."""
        return _STATUS.get(status, f"the decoder left status {status}")

    # --- helpers ----------------------------------------------------------------------------

    def _arguments(self) -> _Arguments:
        """Return the calling thread's arguments."""
        found: _Arguments | None = getattr(self._threads, "arguments", None)
        if found is None:
            found = self._threads.arguments = _Arguments(self._driver)
        return found

    def _entered(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes the device's context current if it is not."""
        if self._driver.current_context() == self._context:
            return _AS_IT_IS
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self._device)
        return device

    def _function(self, kernel: str, dtype: DType) -> Function:
        found = self._functions.get((kernel, dtype))
        if found is None:
            found = self._functions[kernel, dtype] = self._modules.function(kernel, dtype)
        return found


class _Arguments:
    """The arguments of a thread's launches: the packed values, and each kernel's pointer list."""

    def __init__(self, driver: ModuleType) -> None:
        self.encode = driver.Arguments(ENCODE_ARGUMENTS)
        self.decode = driver.Arguments(DECODE_ARGUMENTS)
        self.check = driver.Arguments(CHECK_ARGUMENTS)
        self.taken: dict[str, int] = {}
        for kernel, names in TAKEN.items():
            way = kernel.split("_")[1]
            packed = {"decode": self.decode, "check": self.check}.get(way, self.encode)
            self.taken[kernel] = packed.of_kernel(*names)


_AS_IT_IS: Final = nullcontext()

# One element type for each compiled variant.
_KINDS: Final = (
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.FLOAT32,
    DType.UINT8,
    DType.FLOAT8_E5M2,
    DType.FLOAT64,
)


def _kernels(dtype: DType, ways: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the distinct kernels for these modes and speeds, each way's encoders first."""
    names = chain.from_iterable(
        (*encode_kernels(dtype, mode, speed), *decode_kernels(dtype, mode, speed))
        for mode, speed in ways
    )
    return tuple(dict.fromkeys(names))


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

    The function runs on torch's current stream and waits for it, to learn the blob's size.
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
    """Return the element type in a blob's header, None if the header names no known type."""
    number = int(blob[7]) if blob.numel() > 7 else -1
    return DType(number) if number in DType.__members__.values() else None


@lru_cache(maxsize=16)
def _codec(device: int) -> CudaCodec:
    return CudaCodec(device)
