"""Launches the kernels of csrc/cuda/loss.cu on torch's current stream; NVRTC compiles them first.

CuPy is not used: its compiler flushes denormal numbers to zero, which PyTorch's kernels keep.

All kernels take contiguous GPU logits (N, C) in bfloat16, float16 or float32, with more than
MIN_CLASSES columns and `fits(logits)`. Classes are int64 (N) within 0 to C - 1; all other tensors
are float32 (N). No function waits for the device. The caller must check that the results match
those of the installed PyTorch bit for bit.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import BackendUnavailable, CudaDriverError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..cuda_driver.launch import Arguments, Function

__all__ = [
    "MIN_CLASSES",
    "Statistics",
    "backward",
    "fits",
    "forward",
    "order",
    "prepare",
]

MIN_CLASSES: Final = 2048
"""Up to this many classes PyTorch sums a row with a single warp."""

FORWARD_THREADS: Final = 1024  # kForwardThreads
BACKWARD_THREADS: Final = 512  # kBackwardThreads
VECTOR: Final = 4  # kVector
WARP_BYTES: Final = FORWARD_THREADS // 32 * 4
"""Shared memory per block: one float for each warp."""

_IN_REGISTERS: Final = 9
"""The most elements per thread for which PyTorch holds a row in registers."""

_FOLDER: Final = Path(__file__).parent / "csrc" / "cuda"

# Kinds of the arguments: P is an address, q and I are integers of 64 and 32 bits.
_FORWARD: Final = "PPPPPqI"
_BACKWARD: Final = "PPPPPPq"


def fits(logits: Tensor) -> bool:
    """Return whether the kernels can read the logits: at an address aligned to four elements.

    For float32 any address is valid, since PyTorch reads such logits in place.
    """
    return logits.element_size() == VECTOR or logits.data_ptr() % (2 * VECTOR) == 0


class Statistics(NamedTuple):
    """Values that give a row's log-probabilities: logit - largest - log_total."""

    largest: Tensor
    """The largest logit."""
    log_total: Tensor
    """The logarithm of the sum of exp(logit - largest) over all logits."""


def forward(logits: Tensor, classes: Tensor, picked: Tensor, statistics: Statistics) -> None:
    """Compute each row's `statistics`, and in `picked` the log-probability of its class."""
    rows, count = logits.shape
    shift = _shift(logits)
    kernel = f"loss_forward_{order(count, shift, _shared_bytes(logits.get_device()))}"
    _launch(
        f"{kernel}_{_kind(logits.dtype)}", _FORWARD, rows, FORWARD_THREADS, logits,
        logits.data_ptr(), classes.data_ptr(), picked.data_ptr(), statistics.largest.data_ptr(),
        statistics.log_total.data_ptr(), count, shift,
    )  # fmt: skip


def backward(
    logits: Tensor, classes: Tensor, gradient: Tensor, statistics: Statistics, out: Tensor
) -> None:
    """Compute in `out` the gradient of the logits from that of the classes' log-probabilities.

    `out` has the logits' dtype and shape, and may be the logits' own memory.
    """
    rows, count = logits.shape
    _launch(
        f"loss_backward_{_kind(logits.dtype)}", _BACKWARD, rows, BACKWARD_THREADS, logits,
        logits.data_ptr(), classes.data_ptr(), gradient.data_ptr(), statistics.largest.data_ptr(),
        statistics.log_total.data_ptr(), out.data_ptr(), count,
    )  # fmt: skip


def order(count: int, shift: int, shared_bytes: int) -> str:
    """Return PyTorch's order of additions in a float32 row; it depends on where a row is held."""
    if -(-count // FORWARD_THREADS) <= _IN_REGISTERS:
        return "strided"
    held = (shared_bytes - WARP_BYTES) // 4
    return "vectors" if count < held and not shift and count % VECTOR == 0 else "shifted"


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Compile and load the kernels for a dtype of logits.

    Raises:
        BackendUnavailable: the CUDA bindings are missing, or the kernels cannot be compiled or
            loaded.
    """
    import torch

    with torch.cuda.device(device):
        try:
            _function(device.index, f"loss_backward_{_kind(dtype)}")
        except (CudaDriverError, ImportError, OSError, RuntimeError) as error:  # NVRTC is a library
            raise BackendUnavailable(f"loss.cu cannot be compiled or loaded: {error}") from error


def _shift(logits: Tensor) -> int:
    """Return by how many floats PyTorch's first float32 row begins after a 16-byte boundary."""
    return logits.data_ptr() % 16 // VECTOR if logits.element_size() == VECTOR else 0


def _kind(dtype: torch.dtype) -> str:
    return {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32"}[str(dtype)]


@cache
def _shared_bytes(device: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).shared_memory_per_block)


def _launch(kernel: str, kinds: str, rows: int, threads: int, like: Tensor, *values: int) -> None:
    import torch

    from ..cuda_driver.launch import launch

    index = like.get_device()
    arguments, taken = _arguments(kinds)
    arguments.pack(*values)
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        launch(_function(index, kernel), rows, threads, stream, taken)


_threads = threading.local()  # each thread packs its own arguments


def _arguments(kinds: str) -> tuple[Arguments, int]:
    from ..cuda_driver.launch import Arguments

    known: dict[str, tuple[Arguments, int]] = _threads.__dict__.setdefault("known", {})
    if kinds not in known:
        named = {str(number): kind for number, kind in enumerate(kinds)}
        arguments = Arguments(named)
        known[kinds] = arguments, arguments.of_kernel(*named)
    return known[kinds]


@lru_cache(maxsize=256)
def _function(device: int, kernel: str) -> Function:
    """Return a kernel; `device` must be the current device."""
    from ..cuda_driver.calls import call, driver
    from ..cuda_driver.launch import Function

    module = _module(device)
    handle = call(driver.cuModuleGetFunction, module, kernel.encode(), about=kernel)
    return Function(int(handle), WARP_BYTES, module)


_loading: Final = threading.Lock()


def _module(device: int) -> Any:
    """Return the loaded kernels; if several threads call at first, only one of them compiles."""
    with _loading:
        return _loaded(device)


@cache
def _loaded(device: int) -> Any:
    import torch

    from ..cuda_driver.calls import call, driver

    major, minor = torch.cuda.get_device_capability(device)
    code = _compiled(f"sm_{major}{minor}")
    image = ctypes.create_string_buffer(code, len(code))
    return call(driver.cuModuleLoadData, ctypes.addressof(image), about="loss.cu")


@cache
def _compiled(target: str) -> bytes:
    """Return the machine code for an architecture."""
    from ..cuda_driver.compiling import compiled

    options = (*OPTIONS, f"--gpu-architecture={target}")
    return compiled(SOURCE, options, f"loss.cu cannot be compiled for {target}")


SOURCE: Final = _FOLDER / "loss.cu"
OPTIONS: Final = ("--std=c++17", f"--include-path={_FOLDER}")
