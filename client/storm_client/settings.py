"""PyTorch's settings that decide which bits its functions make, as they are now."""

from __future__ import annotations

import torch

__all__ = ["deciding_settings", "kinds_of_casts", "settings_of_kernels"]


def deciding_settings() -> tuple[object, ...]:
    """Return what is set for the whole process that decides which bits functions make.

    Two equal results mean that the same function makes the same bits, by its own kernels; on a CPU
    if as many threads share it (`settings_of_kernels`).
    """
    precision = torch._C._get_fp32_precision_getter
    return (
        torch.get_default_dtype(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_sdp_priority_order(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_mkldnn_enabled(),
        *(precision(*kind) for kind in _OF_SINGLE_PRECISION),
    )


def settings_of_kernels(device: str, *, is_simple: bool = False) -> tuple[object, ...]:
    """Return what decides which bits functions make on a type of device, in this thread.

    Simple are functions that are no product and no attention: of each a GPU has one kernel. On a
    CPU threads share sums, and oneDNN has kernels of its own.
    """
    threads = (torch.get_num_threads(),) if device == "cpu" else ()
    if not is_simple:
        return deciding_settings() + threads
    return (torch._C._get_mkldnn_enabled(), *threads) if threads else ()


def kinds_of_casts() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return for which devices operations cast what they are given, in this thread, and to what."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


_OF_SINGLE_PRECISION = [
    (by, kind) for by in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")
]
"""Who computes what, in single precision or less."""
