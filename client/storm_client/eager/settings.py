"""PyTorch's settings that decide which bits its functions make, as they are now.

Nothing here changes what it looks at. `torch.get_num_threads()` would: it gives the thread that
asks the process's count, which oneDNN's kernels then use in that thread and did not before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any, Final

import torch

__all__ = [
    "DECIDING",
    "GETTERS",
    "deciding_settings",
    "kinds_of_casts",
    "omp_threads_address",
    "overridden_kernels",
    "settings_of_kernels",
]

DECIDING: Final = (
    "_get_blas_preferred_backend",
    "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublaslt_prefer_grouped_gemm",
    "_get_cudnn_benchmark",
    "_get_cudnn_depthwise_kernel",
    "_get_cudnn_deterministic",
    "_get_cudnn_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_deterministic_algorithms",
    "_get_fa3_sdp_enabled",
    "_get_fa4_sdp_enabled",
    "_get_flash_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_miopen_immediate",
    "_get_mkldnn_deterministic",
    "_get_mkldnn_enabled",
    "_get_native_aot_enabled",
    "_get_native_aot_unconditional_masked",
    "_get_nnpack_enabled",
    "_get_onednn_allow_tf32",
    "_get_overrideable_sdp_enabled",
    "_get_rocm_fa_preferred_backend",
    "_get_sdp_priority_order",
    "_get_sm_carveout_experimental",
)
"""Whose results decide bits, among what torch._C tells of the process; some are of later versions.

Those of single precision are not here: PyTorch refuses to tell them by their old names once the new
ones were used."""


def deciding_settings() -> tuple[object, ...]:
    """Return what is set for the whole process that decides which bits functions make.

    Two equal results mean that the same function makes the same bits, by its own kernels; on a CPU
    if as many threads share it (`settings_of_kernels`).
    """
    return tuple([getter(*arguments) for getter, arguments in GETTERS])


def settings_of_kernels(device: str, *, is_simple: bool = False) -> tuple[object, ...]:
    """Return what decides which bits functions make on a type of device, in this thread.

    Simple are functions that are no product and no attention: of each a GPU has one kernel. On a
    CPU threads share sums, and oneDNN has kernels of its own.
    """
    here = _of_this_thread() if device == "cpu" else ()
    if not is_simple:
        return (*deciding_settings(), *here, overridden_kernels())
    simple = (torch.get_default_dtype(), overridden_kernels())
    return (*simple, torch._C._get_mkldnn_enabled(), *here) if here else simple


def kinds_of_casts() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return for which devices operations cast what they are given, in this thread, and to what."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


def overridden_kernels() -> frozenset[str]:
    """Return PyTorch's own operators that Python code computes in this process, with the keys.

    They are looked through when their number has changed, as it does where one is put on or off.
    """
    global _overridden  # noqa: PLW0603 - one process, one dispatcher
    names = torch.library._impls
    if len(names) != _overridden[0]:
        _overridden = len(names), frozenset(filter(_computes, tuple(names)))
    return _overridden[1]


def _computes(name: str) -> bool:
    return name.startswith("aten/") and not name.endswith("/Meta")


_overridden: tuple[int, frozenset[str]] = (-1, frozenset())


def _of_this_thread() -> tuple[object, ...]:
    """Return what decides a CPU's bits in this thread, and which thread it is.

    A function that this thread has run already has no other effect on the thread when it runs
    again. In another it may: the first that PyTorch shares among threads gives that one its count.
    """
    return get_ident(), _omp_threads(), _flushes_denormals()


_SMALLEST_NORMAL: Final = 2.2250738585072014e-308


def _flushes_denormals() -> bool:
    """Tell whether this thread computes with zero where a number is very small."""
    return _SMALLEST_NORMAL * _HALF == 0.0


_HALF = 0.5
"""Not a constant to Python's compiler, which would compute with it once and for all."""


def omp_threads_address() -> int:
    """Return where the function is that tells among how many threads OpenMP shares work.

    0 where PyTorch has been built without.
    """
    return ctypes.cast(_omp, ctypes.c_void_p).value or 0 if _omp is not None else 0


def _find_omp_threads() -> Any:
    """Return that function from PyTorch's library, to be called with the interpreter's lock.

    To give that up takes longer than the call.
    """
    with suppress(OSError, AttributeError):
        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        return ctypes.PyDLL(str(library)).omp_get_max_threads
    return None


_omp: Final = _find_omp_threads()
_omp_threads: Final[Callable[[], object]] = object if _omp is None else _omp
"""Where PyTorch has been built without OpenMP it is never the same, so that nothing is recomputed
on a CPU."""

_GETTERS: Final[list[Callable[[], Any]]] = [
    getattr(torch._C, name) for name in DECIDING if hasattr(torch._C, name)
]

_OF_SINGLE_PRECISION: Final = [
    (by, kind) for by in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")
]
"""Who computes what, in single precision or less."""

GETTERS: Final[tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]] = (
    (torch.get_default_dtype, ()),
    *[(getter, ()) for getter in _GETTERS],
    *[(torch._C._get_fp32_precision_getter, kind) for kind in _OF_SINGLE_PRECISION],
)
"""Functions written in C, and their arguments, that tell `deciding_settings`."""
