"""Checks twice a second whether the lane's devices still take work, also when nobody uses them.

Suppose that under CUDA's MPS a process is killed while one of its kernels runs. Then the contexts
of all other processes fail, on every GPU of the server and from then on. MPS takes no new process
until all of them have ended. So a daemon that did not notice would keep every later training from
its GPU. The watch has a thread of its own: the driver has taken 0.4 s for the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from stormd.lanes.cuda.device import CudaDevice

__all__ = ["DeviceWatch"]

LOOK_SECONDS: Final = 0.5
CLOSE_SECONDS: Final = 5.0
"""How long to wait for a slow driver; a thread whose driver hangs is abandoned."""


class DeviceWatch:
    """Makes devices check whether they are broken, from now on until `close`."""

    def __init__(self, devices: Iterable[CudaDevice]) -> None:
        self._devices = tuple(devices)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stormd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking; return once no check runs. Calling it twice is fine."""
        self._stopping.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            for device in self._devices:
                device.check_fault()
