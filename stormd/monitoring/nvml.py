"""A GPU's utilisation and the memory of each process on it, from NVIDIA's management library.

Nothing here creates a context or takes device memory. If the library or its bindings are missing,
or a query is refused, the answer is None, never a guess. A call may take milliseconds, too long for
the event loop. So the gauge has a thread of its own, which queries once a second.
"""

from __future__ import annotations

import threading
from typing import Any, Final

__all__ = ["GpuGauge", "Nvml", "open_nvml"]


def open_nvml() -> Nvml | None:
    """Return the initialised library; None if there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None
    return Nvml(pynvml)


class Nvml:
    """Queries devices by their UUID, with the prefix `GPU-` or without. For any thread."""

    def __init__(self, library: Any) -> None:
        """Use the module `pynvml`, which is initialised."""
        self._library = library

    def busy_percent(self, uuid: str) -> int | None:
        """Return the percentage of the driver's last sample period in which a kernel ran."""
        try:
            return int(self._library.nvmlDeviceGetUtilizationRates(self._device(uuid)).gpu)
        except self._library.NVMLError:
            return None

    def process_bytes(self, uuid: str) -> dict[int, int] | None:
        """Return the bytes of device memory of each process that computes there, by process id.

        Contexts and code are counted. In a container, the ids often differ from the local ones.
        """
        try:
            found = self._library.nvmlDeviceGetComputeRunningProcesses(self._device(uuid))
        except self._library.NVMLError:
            return None
        return {one.pid: one.usedGpuMemory for one in found if one.usedGpuMemory is not None}

    def _device(self, uuid: str) -> Any:
        return self._library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")


_SECONDS: Final = 1.0


class GpuGauge:
    """Watches the devices of these UUIDs until `close`; without any, it does nothing."""

    def __init__(self, uuids: list[str], *, seconds: float = _SECONDS) -> None:
        self._uuids = uuids
        self._seconds = seconds
        self._percent: dict[str, int | None] = {}  # written by the thread, replaced as a whole
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        nvml = open_nvml() if uuids else None
        if nvml is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(nvml,), name="stormd-gpu-gauge", daemon=True
            )
            self._thread.start()

    def busy_percent(self, uuid: str) -> int | None:
        """Return the percentage of time in which a kernel ran, as last queried, or None."""
        return self._percent.get(uuid)

    def close(self) -> None:
        """End the thread. Twice is fine."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, nvml: Nvml) -> None:
        while True:
            self._percent = {uuid: nvml.busy_percent(uuid) for uuid in self._uuids}
            if self._closing.wait(self._seconds):
                return
