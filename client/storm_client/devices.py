"""CUDA calls that name their device explicitly.

A thread's current device may differ from a tensor's device, and may have no context yet. A call
without a device would then ask about the wrong device. It would also create a context there, which
takes some hundred MiB of that device's memory.
"""

from __future__ import annotations

import torch

from storm_client.errors import UsageError

__all__ = ["devices_in_use", "is_capturing", "unused_bytes", "usable", "with_number"]


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's work on a GPU is being captured into a CUDA graph."""
    if torch._C._cuda_getDevice() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def devices_in_use() -> list[torch.device]:
    """Return the GPUs on which this process has a context."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it so
        return []
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # torch's gap
    return [torch.device("cuda", n) for n in range(torch.cuda.device_count()) if has_context(n)]


def unused_bytes(device: torch.device) -> int:
    """Return how many bytes of a GPU are free, or are PyTorch's and unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def with_number(device: torch.device) -> torch.device:
    """Return the device with its index; "cuda" alone means this thread's current device."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def usable(device: torch.device | str) -> torch.device:
    """Return the device, with its index if there may be several of its type.

    Raises:
        UsageError: torch does not know the device, or cannot use it here.
    """
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(f"device is {device!r}, which cannot be used: {error}") from error
