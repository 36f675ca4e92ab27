"""The present settings of PyTorch that decide which bits its functions make.

Nothing here changes a setting that it reads. `torch.get_num_threads()` would: it sets the calling
thread's OpenMP thread count to the process's count, and oneDNN's kernels then use that count in
this thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from threading import get_ident
from typing import Any, Final

import torch

__all__ = [
    "DECIDING",
    "GETTERS",
    "KernelChoice",
    "deciding_settings",
    "differing_settings",
    "kinds_of_casts",
    "name_of_setting",
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
"""Getters of torch._C whose process-wide settings decide bits; some exist only in later versions.

The getters of single precision are not here: PyTorch refuses the old ones once the new ones were
used."""


def deciding_settings() -> tuple[object, ...]:
    """Return the settings of the whole process that decide which bits functions make.

    If two results are equal, the same function makes the same bits, by its own kernels. On a CPU it
    also has to run on the same number of threads (`settings_of_kernels`).
    """
    return tuple([getter(*arguments) for getter, arguments in GETTERS])


class KernelChoice(IntEnum):
    """Which of the process's settings choose the kernel of a function."""

    NONE = 0
    """A GPU has one kernel for it. On a CPU, oneDNN has kernels of its own."""
    PRODUCT = 1
    """All but those of attention. PyTorch itself changes one of those, in a process's first
    attention on a GPU; and a script may have set them for its forward pass alone."""
    ATTENTION = 2
    """All: attention, and what is not in our table of functions."""


def settings_of_kernels(device: str, choice: KernelChoice) -> tuple[object, ...]:
    """Return the settings that decide which bits functions make on a device type, in this thread.

    On a CPU, threads share sums.
    """
    here = _of_this_thread() if device == "cpu" else ()
    if choice is KernelChoice.ATTENTION:
        return (*deciding_settings(), *here, overridden_kernels())
    if choice is KernelChoice.PRODUCT:
        products = [getter(*arguments) for getter, arguments in _OF_PRODUCTS]
        return (*products, *here, overridden_kernels())
    simple = (torch.get_default_dtype(), overridden_kernels())
    return (*simple, torch._C._get_mkldnn_enabled(), *here) if here else simple


def differing_settings(device: str, choice: KernelChoice, before: tuple[object, ...]) -> list[str]:
    """Return the keys of those that differ from `before`, which `settings_of_kernels` returned."""
    now, keys = settings_of_kernels(device, choice), _keys_of_kernels(device, choice)
    return [key for key, one, other in zip(keys, before, now, strict=True) if one != other]


def _keys_of_kernels(device: str, choice: KernelChoice) -> tuple[str, ...]:
    """Return the key of each setting that `settings_of_kernels` returns."""
    here = ("thread", "threads", "denormals") if device == "cpu" else ()
    if choice is KernelChoice.NONE:
        simple = ("get_default_dtype", "overridden")
        return (*simple, "_get_mkldnn_enabled", *here) if here else simple
    getters = GETTERS if choice is KernelChoice.ATTENTION else _OF_PRODUCTS
    return (*(getter.__name__ for getter, _ in getters), *here, "overridden")


def name_of_setting(key: str) -> str:
    """Return what messages call a setting, by the key that Python and compiled code use."""
    return _NAMES.get(key) or key.removeprefix("_get_")


def kinds_of_casts() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return for each device type whether autocast is on in this thread, and its dtype."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


def overridden_kernels() -> frozenset[str]:
    """Return PyTorch's own operators that Python code overrides in this process, with their keys.

    The overrides are searched only when their number has changed, as it does when one is added or
    removed.
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
    """Return the settings that decide a CPU's bits in this thread, and the thread's identity.

    A function that this thread has run before does not change the thread's settings when it runs
    again. In another thread it may: the first function that PyTorch runs on several threads sets
    the calling thread's OpenMP thread count.
    """
    return get_ident(), _omp_threads(), _flushes_denormals()


_SMALLEST_NORMAL: Final = 2.2250738585072014e-308


def _flushes_denormals() -> bool:
    """Return whether this thread flushes denormal numbers to zero."""
    return _SMALLEST_NORMAL * _HALF == 0.0


_HALF = 0.5
"""A variable, so that Python's compiler does not fold the product into a constant."""


def omp_threads_address() -> int:
    """Return the address of the function that returns OpenMP's thread count.

    0 where PyTorch has been built without OpenMP.
    """
    return ctypes.cast(_omp, ctypes.c_void_p).value or 0 if _omp is not None else 0


def _find_omp_threads() -> Any:
    """Return that function from PyTorch's library; calls of it hold Python's interpreter lock.

    Releasing the lock takes longer than the call.
    """
    with suppress(OSError, AttributeError):
        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        return ctypes.PyDLL(str(library)).omp_get_max_threads
    return None


_omp: Final = _find_omp_threads()
_omp_threads: Final[Callable[[], object]] = object if _omp is None else _omp
"""Where PyTorch has been built without OpenMP, each call returns a new object. No two results are
equal then, so nothing is recomputed on a CPU."""

_GETTERS: Final[list[Callable[[], Any]]] = [
    getattr(torch._C, name) for name in DECIDING if hasattr(torch._C, name)
]

_OF_SINGLE_PRECISION: Final = [
    (by, kind) for by in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")
]
"""Backends and operations whose precision for float32 can be reduced."""

GETTERS: Final[tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]] = (
    (torch.get_default_dtype, ()),
    *[(getter, ()) for getter in _GETTERS],
    *[(torch._C._get_fp32_precision_getter, kind) for kind in _OF_SINGLE_PRECISION],
)
"""C functions, with their arguments, whose results are `deciding_settings`."""

_NAMES: Final = {
    "thread": "the thread itself, on a CPU",
    "threads": "number of threads",
    "denormals": "small numbers as zero",
    "overridden": "overridden operators",
    "measured": "TunableOp",
    "get_default_dtype": "default dtype",
    "_get_fp32_precision_getter": "precision of float32",
    "_get_mkldnn_enabled": "oneDNN",
}
"""What messages call settings; others by the names of their getters."""

_OF_PRODUCTS: Final = tuple(one for one in GETTERS if "_sdp_" not in one[0].__name__)
