"""How busy the GPUs are, as the driver's management library says, looked at once a second.

The library is called from a thread of its own, never from the event loop, for a call can take
milliseconds. Where there is no answer, None is reported and nothing is guessed.
"""

from __future__ import annotations

import threading
from typing import Final

from stormd.monitoring.nvml import Nvml, open_nvml

__all__ = ["GpuGauge"]

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
        """Return the share of the last look's sample period in which a kernel ran, or None."""
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
