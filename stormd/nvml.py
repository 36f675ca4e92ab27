"""What NVIDIA's management library says of a GPU: how busy it is, and whose memory it holds.

What stays true: nothing here makes a context, takes device memory or needs a package: the
driver's own library is called, and where it is missing or refuses, the answer is None, never a
guess. A call may take milliseconds: not for the event loop.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

__all__ = ["Nvml", "open_nvml"]

_SUCCESS: Final = 0
_NOT_AVAILABLE: Final = (1 << 64) - 1
_MOST_PROCESSES: Final = 256


class _Utilisation(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, version 2."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def open_nvml() -> Nvml | None:
    """Return the library, ready to be asked; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return Nvml(library) if library.nvmlInit_v2() == _SUCCESS else None


class Nvml:
    """Devices are named by their UUID, with the prefix `GPU-` or without. For any thread."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def busy_percent(self, uuid: str) -> int | None:
        """Return the share of the driver's last sample period in which a kernel ran."""
        device, found = self._device(uuid), _Utilisation()
        if device is None:
            return None
        status = self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(found))
        return int(found.gpu) if status == _SUCCESS else None

    def process_bytes(self, uuid: str) -> dict[int, int] | None:
        """Return the device memory of each process that computes there, by process id.

        Contexts and code are counted. Inside a container the ids are often not those of here.
        """
        device, count = self._device(uuid), ctypes.c_uint(_MOST_PROCESSES)
        found = (_Process * _MOST_PROCESSES)()
        if device is None:
            return None
        ask = self._library.nvmlDeviceGetComputeRunningProcesses_v3
        if ask(device, ctypes.byref(count), found) != _SUCCESS:
            return None
        known = (one for one in found[: count.value] if one.used_bytes != _NOT_AVAILABLE)
        return {int(one.pid): int(one.used_bytes) for one in known}

    def _device(self, uuid: str) -> ctypes.c_void_p | None:
        device = ctypes.c_void_p()
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        status = self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device))
        return device if status == _SUCCESS else None
