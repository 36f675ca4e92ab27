"""Device memory, memory mapped from another process, and host memory that a device can reach.

An object owns a valid resource from its construction on, and `close()` releases it once. The caller
of `close()` ensures that no stream uses the memory any more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from storm_kernels.cuda_driver.calls import call, driver

__all__ = [
    "HANDLE_BYTES",
    "DeviceBuffer",
    "IpcMapping",
    "MappedHost",
    "RegisteredHost",
    "allocation",
    "buffer_id",
    "exportable",
    "ipc_handle",
]

HANDLE_BYTES = 64
"""Bytes of a CUDA IPC memory handle."""

_LAZY_PEER = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
_REGISTER = int(driver.CU_MEMHOSTREGISTER_PORTABLE) | int(driver.CU_MEMHOSTREGISTER_DEVICEMAP)
_HOST_ALLOC = int(driver.CU_MEMHOSTALLOC_PORTABLE) | int(driver.CU_MEMHOSTALLOC_DEVICEMAP)


class DeviceBuffer:
    """`nbytes` of device memory, allocated by the driver so that it can always be exported."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(call(driver.cuMemAlloc, nbytes, about=f"{nbytes} bytes"))
        self._open = True

    def ipc_handle(self) -> bytes:
        """Return the handle by which another process of this machine can map the buffer."""
        return ipc_handle(self.address)

    def close(self) -> None:
        """Free the memory; waits for the device."""
        if self._open:
            self._open = False
            call(driver.cuMemFree, self.address)


class IpcMapping:
    """Another process's device memory, mapped here; the memory lives at least as long as this.

    Raises:
        ValueError: the handle has the wrong length.
        CudaDriverError: the handle is invalid, or the memory belongs to this process.
    """

    def __init__(self, handle: bytes) -> None:
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        native = driver.CUipcMemHandle()
        ctypes.memmove(native.getPtr(), handle, HANDLE_BYTES)
        self.address = int(call(driver.cuIpcOpenMemHandle, native, _LAZY_PEER))
        self._open = True
        base, nbytes = call(driver.cuMemGetAddressRange, self.address)
        self.nbytes = int(nbytes) - (self.address - int(base))

    def close(self) -> None:
        """Unmap the memory; may wait for the device."""
        if self._open:
            self._open = False
            call(driver.cuIpcCloseMemHandle, self.address)


class MappedHost:
    """A small zeroed area of pinned host memory that kernels write and the CPU reads."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(call(driver.cuMemHostAlloc, nbytes, _HOST_ALLOC))
        self._open = True
        ctypes.memset(self.address, 0, nbytes)
        self.device_address = int(call(driver.cuMemHostGetDevicePointer, self.address, 0))

    def words(self) -> ctypes.Array[ctypes.c_uint64]:
        """Return the memory as 64-bit words; do not use the array after `close`."""
        return (ctypes.c_uint64 * (self.nbytes // 8)).from_address(self.address)

    def close(self) -> None:
        """Free the memory; waits for the device."""
        if self._open:
            self._open = False
            call(driver.cuMemFreeHost, self.address)


class RegisteredHost:
    """Existing host memory, registered with CUDA: pinned, and accessible from every device.

    The memory is registered in pieces of `piece_bytes`, because one call over several hundred GiB
    fails on recent drivers. The pieces cover the range without a gap. A copy must not cross a
    border between two pieces (`pieces` splits it). The constructor calls `before_piece` before it
    registers each piece, which takes the driver seconds; an exception from `before_piece` ends the
    construction.

    Raises:
        CudaDriverError: a piece cannot be registered; the pieces before it are unregistered.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        piece_bytes: int = 1 << 33,
        *,
        before_piece: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self._piece_bytes = piece_bytes
        self._registered: list[int] = []
        try:
            for start in range(address, address + nbytes, piece_bytes):
                if before_piece is not None:
                    before_piece()
                size = min(piece_bytes, address + nbytes - start)
                about = f"{size} bytes at {start:#x}: check the memory-lock limit"
                call(driver.cuMemHostRegister, start, size, _REGISTER, about=about)
                self._registered.append(start)
            # The address of the first byte as the device sees it.
            self.device_address = int(call(driver.cuMemHostGetDevicePointer, address, 0))
        except BaseException:
            self.close()
            raise

    def pieces(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of the parts of a range, split at borders of pieces."""
        found = []
        while nbytes:
            room = self._piece_bytes - offset % self._piece_bytes
            size = min(room, nbytes)
            found.append((self.address + offset, size))
            offset, nbytes = offset + size, nbytes - size
        return found

    def close(self) -> None:
        """Unregister the memory; it remains mapped."""
        while self._registered:
            call(driver.cuMemHostUnregister, self._registered.pop())


def allocation(address: int) -> tuple[int, int]:
    """Return (address, bytes) of the whole allocation that contains a device address."""
    base, nbytes = call(driver.cuMemGetAddressRange, address)
    return int(base), int(nbytes)


def ipc_handle(address: int) -> bytes:
    """Return the handle by which another process can map the allocation that begins at `address`.

    Raises:
        CudaDriverError: this kind of allocation cannot be exported (see `exportable`).
    """
    handle = call(driver.cuIpcGetMemHandle, address)
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def buffer_id(address: int) -> int:
    """Return the id of the allocation at a device address; unlike addresses, ids are not reused."""
    return int(call(driver.cuPointerGetAttribute, _BUFFER_ID, address))


def exportable(address: int) -> bool:
    """Return whether the allocation at a device address can be exported by a CUDA IPC handle."""
    return bool(call(driver.cuPointerGetAttribute, _IPC_CAPABLE, address))


_BUFFER_ID = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
_IPC_CAPABLE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
