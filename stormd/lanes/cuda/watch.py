"""Looks twice a second whether the lane's devices still take work, also where nobody uses them.

Under CUDA's MPS a process that is killed while a kernel of its runs takes the contexts of all
others with it, on every GPU of the server. Theirs fail from then on, and MPS takes no new process
until all of them have ended. So a daemon that did not notice would keep every later training from
its GPU. It runs in a thread of its own: the driver has taken 0.4 s for the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from stormd.lanes.cuda.device import CudaDevice

__all__ = ["DeviceWatch"]

LOOK_SECONDS: Final = 0.5
CLOSE_SECONDS: Final = 5.0
"""For a driver that is slow to answer; one that hangs is left behind."""


class DeviceWatch:
    """Has devices note whether they are broken, from now on until `close`."""

    def __init__(self, devices: Iterable[CudaDevice]) -> None:
        self._devices = tuple(devices)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stormd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more; returns once no device is looked at. Twice is fine."""
        self._stopping.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            for device in self._devices:
                device.look()
