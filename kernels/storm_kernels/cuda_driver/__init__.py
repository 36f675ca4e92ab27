"""Thin, checked, typed wrappers of the CUDA driver calls that both ends of the CUDA lane need.

Each class owns one CUDA object and releases it once. A call that fails raises an error that names
the call. Importing this package without the CUDA bindings raises errors.BackendUnavailable. So
code imports it where it opens a CUDA lane, never before.
"""

from storm_kernels.cuda_driver.device import PrimaryContext, device_uuids, pci_bus_id
from storm_kernels.cuda_driver.memory import (
    HANDLE_BYTES,
    DeviceBuffer,
    IpcMapping,
    MappedHost,
    RegisteredHost,
    allocation,
    buffer_id,
    exportable,
    ipc_handle,
)
from storm_kernels.cuda_driver.stream import (
    Event,
    Stream,
    copy_async,
    elapsed_seconds,
    wait_event,
    wait_value,
    write_value,
)
from storm_kernels.cuda_driver.virtual import (
    AddressRange,
    holds,
    is_shareable,
    release_piece,
    reserved_range,
    retain_piece,
    share_piece,
)

__all__ = [
    "HANDLE_BYTES",
    "AddressRange",
    "DeviceBuffer",
    "Event",
    "IpcMapping",
    "MappedHost",
    "PrimaryContext",
    "RegisteredHost",
    "Stream",
    "allocation",
    "buffer_id",
    "copy_async",
    "device_uuids",
    "elapsed_seconds",
    "exportable",
    "holds",
    "ipc_handle",
    "is_shareable",
    "pci_bus_id",
    "release_piece",
    "reserved_range",
    "retain_piece",
    "share_piece",
    "wait_event",
    "wait_value",
    "write_value",
]
