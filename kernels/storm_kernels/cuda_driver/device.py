"""A CUDA device and the context that all libraries of a process share on it.

It is the primary context, the one that PyTorch and CuPy use: addresses, streams and events of this
package and theirs may be mixed freely.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from storm_kernels.cuda_driver.calls import call, driver, initialise
from storm_kernels.errors import BackendUnavailable

__all__ = ["PrimaryContext", "device_uuids", "pci_bus_id"]

BUS_ID_BYTES: Final = 32
"""Room for a device's name on the bus, with the byte that ends it."""


def device_uuids() -> list[str]:
    """Return the UUID of each visible device as text, by ordinal.

    Raises:
        BackendUnavailable: there is no driver or no device.
    """
    initialise()
    count = int(call(driver.cuDeviceGetCount))
    return [_uuid_of(call(driver.cuDeviceGet, ordinal)) for ordinal in range(count)]


def pci_bus_id(ordinal: int) -> str:
    """Return where a visible device is on the PCI bus, as `0000:3b:00.0`.

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
        """Make this the calling thread's context; each thread needs it once."""
        call(driver.cuCtxSetCurrent, self._context)

    def shared_by_mps(self) -> bool:
        """Tell whether MPS lets processes use the device at once, not by time slices."""
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        return bool(call(driver.cuDeviceGetAttribute, attribute, self._device))

    def total_bytes(self) -> int:
        """Return how much memory the device has."""
        return int(call(driver.cuDeviceTotalMem, self._device))

    def priorities(self) -> tuple[int, int]:
        """Return the least and the greatest stream priority; smaller numbers are greater."""
        least, greatest = call(driver.cuCtxGetStreamPriorityRange)
        return int(least), int(greatest)

    def close(self) -> None:
        """Give the context up. What was created in it must be closed before."""
        if self._open:
            self._open = False
            call(driver.cuDevicePrimaryCtxRelease, self._device)
