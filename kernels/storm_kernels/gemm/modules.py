"""Compiles gemm.cu with NVRTC, once per variant and process, and launches its kernels.

It needs PyTorch and the CUDA bindings, which are loaded when a function here is called.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import BackendUnavailable, CudaDriverError
from .jobs import BACKWARD_SHARED_BYTES, PRODUCT_SHARED_BYTES, RECORDS_SHARED_BYTES, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from ..cuda_driver.launch import Function

__all__ = ["CAPABILITY", "OPTIONS", "SOURCE", "launch", "prepare", "tensor_map"]

CAPABILITY: Final = (9, 0)
"""Only sm_90a has the warpgroup instructions, and no other device runs sm_90a code."""

_FOLDER: Final = Path(__file__).parent / "csrc" / "cuda"
SOURCE: Final = _FOLDER / "gemm.cu"
OPTIONS: Final = ("--std=c++17", f"--include-path={_FOLDER}", "--gpu-architecture=sm_90a")

_SHARED_BYTES: Final = {
    "gemm_product": PRODUCT_SHARED_BYTES,
    "gemm_records": RECORDS_SHARED_BYTES,
    "gemm_backward": BACKWARD_SHARED_BYTES,
}


def launch(
    variant: Variant,
    kernel: str,
    shape: tuple[int, int],
    like: Tensor,
    arguments: tuple[Any, ...],
) -> None:
    """Launch a kernel on the current stream of the device of `like`.

    `shape` is (blocks, threads). Arguments are ctypes structures or tensor maps.
    """
    import torch

    from ..cuda_driver.launch import launch as launch_on

    index = like.get_device()
    pointers = (ctypes.c_void_p * len(arguments))(*map(_address, arguments))
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        function = _function(index, variant, kernel)
        launch_on(function, *shape, stream, ctypes.addressof(pointers))


def prepare(device: int, variant: Variant) -> None:
    """Compile and load a variant's kernels.

    Raises:
        BackendUnavailable: the CUDA bindings are missing, or the kernels cannot be compiled or
            loaded.
    """
    import torch

    with torch.cuda.device(device):
        try:
            for kernel in _SHARED_BYTES:
                _function(device, variant, kernel)
        except (CudaDriverError, ImportError, OSError, RuntimeError) as error:
            raise BackendUnavailable(f"gemm.cu cannot be compiled or loaded: {error}") from error


def tensor_map(matrix: Tensor, box_rows: int) -> Any:
    """Return the tensor map for copies of boxes of `box_rows` rows and 64 columns of a matrix.

    The matrix is bfloat16 or float16 with contiguous rows. Its address and row pitch are multiples
    of 16 bytes.
    """
    rows, columns = matrix.shape
    is_half = matrix.element_size() == 2 and str(matrix.dtype) == "torch.float16"
    return _tensor_map(
        matrix.data_ptr(), (rows, columns), 2 * matrix.stride(0), box_rows, is_half=is_half
    )


@lru_cache(maxsize=4096)
def _tensor_map(
    address: int, shape: tuple[int, int], pitch: int, box_rows: int, *, is_half: bool
) -> Any:
    from ..cuda_driver.calls import call, driver

    rows, columns = shape
    types = driver.CUtensorMapDataType
    kind = types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    if is_half:
        kind = types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    return call(
        driver.cuTensorMapEncodeTiled,
        kind,
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(pitch)],
        [driver.cuuint32_t(64), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        about=f"a matrix of {rows} x {columns} with rows of {pitch} bytes",
    )


def _address(argument: Any) -> int:
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    return int(argument.getPtr())


@lru_cache(maxsize=256)
def _function(device: int, variant: Variant, kernel: str) -> Function:
    """Return a kernel; `device` must be the current device."""
    from ..cuda_driver.calls import call, driver
    from ..cuda_driver.launch import Function

    module = _module(device, variant)
    handle = call(driver.cuModuleGetFunction, module, kernel.encode(), about=kernel)
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    shared_bytes = _SHARED_BYTES[kernel]
    call(driver.cuFuncSetAttribute, handle, most, shared_bytes, about=kernel)
    return Function(int(handle), shared_bytes, module)


_loading: Final = threading.Lock()


def _module(device: int, variant: Variant) -> Any:
    """Return the loaded kernels; if several threads call at first, only one of them compiles."""
    with _loading:
        return _loaded(device, variant)


@cache
def _loaded(device: int, variant: Variant) -> Any:  # noqa: ARG001 (a module a device)
    from ..cuda_driver.calls import call, driver

    code = _compiled(variant)
    image = ctypes.create_string_buffer(code, len(code))
    return call(driver.cuModuleLoadData, ctypes.addressof(image), about="gemm.cu")


@cache
def _compiled(variant: Variant) -> bytes:
    """Return the machine code."""
    from ..cuda_driver.compiling import compiled

    defines = (f"--define-macro={name}={value}" for name, value in variant.defines().items())
    return compiled(SOURCE, (*OPTIONS, *defines), "gemm.cu cannot be compiled")
