"""A CUDA device and the context that all libraries of a process share on it.

The context is the primary context, which PyTorch and CuPy use too. So addresses, streams and
events of this package and of those libraries may be mixed freely.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from storm_kernels.cuda_driver.calls import call, driver, initialise
from storm_kernels.errors import BackendUnavailable

__all__ = ["PrimaryContext", "device_uuids", "pci_bus_id"]

BUS_ID_BYTES: Final = 32
"""Buffer size for a device's PCI bus id, including the terminating zero byte."""


def device_uuids() -> list[str]:
    """Return the UUID of each visible device as text, by ordinal.

    Raises:
        BackendUnavailable: there is no driver or no device.
    """
    initialise()
    count = int(call(driver.cuDeviceGetCount))
    return [_uuid_of(call(driver.cuDeviceGet, ordinal)) for ordinal in range(count)]


def pci_bus_id(ordinal: int) -> str:
    """Return the PCI bus id of a visible device, such as `0000:3b:00.0`.

    Raises:
        BackendUnavailable: there is no driver or no device.
        CudaDriverError: no device has this ordinal.
    """
    initialise()
    name = call(driver.cuDeviceGetPCIBusId, BUS_ID_BYTES, call(driver.cuDeviceGet, ordinal))
    return bytes(name).partition(b"\0")[0].decode().lower()


def _uuid_of(device: Any) -> str:
    return str(uuid.UUID(bytes=bytes(call(driver.cuDeviceGetUuid, device).bytes)))


class PrimaryContext:
    """The primary context of one device, retained until `close`.

    Raises:
        BackendUnavailable: no device has this ordinal.
        CudaDriverError: the context cannot be created.
    """

    def __init__(self, ordinal: int) -> None:
        initialise()
        count = int(call(driver.cuDeviceGetCount))
        if not 0 <= ordinal < count:
            raise BackendUnavailable(f"CUDA device {ordinal} does not exist: {count} are visible")
        self.ordinal = ordinal
        self._device = call(driver.cuDeviceGet, ordinal)
        self.uuid = _uuid_of(self._device)
        self._context = call(driver.cuDevicePrimaryCtxRetain, self._device)
        self._open = True

    def make_current(self) -> None:
        """Make this the calling thread's current context; each thread must do so once."""
        call(driver.cuCtxSetCurrent, self._context)

    def shared_by_mps(self) -> bool:
        """Return whether MPS lets processes use the device concurrently, without time slices."""
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        return bool(call(driver.cuDeviceGetAttribute, attribute, self._device))

    def total_bytes(self) -> int:
        """Return the size of the device's memory."""
        return int(call(driver.cuDeviceTotalMem, self._device))

    def priorities(self) -> tuple[int, int]:
        """Return the lowest and the highest stream priority; smaller numbers are higher."""
        least, greatest = call(driver.cuCtxGetStreamPriorityRange)
        return int(least), int(greatest)

    def close(self) -> None:
        """Release the context. Close all objects that were created in it first."""
        if self._open:
            self._open = False
            call(driver.cuDevicePrimaryCtxRelease, self._device)
