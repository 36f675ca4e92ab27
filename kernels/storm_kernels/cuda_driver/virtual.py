"""Memory that is mapped piece by piece into a range of addresses and shared between processes.

A process reserves addresses, creates pieces of memory, and maps each piece at an address of its
choice. PyTorch's expandable segments do so. The driver frees a piece when it is unmapped
everywhere, every retained handle is released, and every descriptor is closed. While a handle is
retained, no other piece gets the same handle.
"""

from __future__ import annotations

import os
from typing import Any

from storm_kernels.cuda_driver.calls import call, check, driver
from storm_kernels.errors import CudaDriverError

__all__ = [
    "AddressRange",
    "holds",
    "is_shareable",
    "release_piece",
    "reserved_range",
    "retain_piece",
    "share_piece",
]

_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_RANGE_START = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
_RANGE_SIZE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_NO_PIECE = tuple(
    f"CUDA_ERROR_{one}" for one in ("INVALID_VALUE", "NOT_SUPPORTED", "NOT_PERMITTED")
)
"""The driver's errors for an address at which no piece is mapped."""


def retain_piece(address: int) -> int | None:
    """Return the handle of the piece that is mapped at an address, None if there is none.

    The piece is not freed before `release_piece`, even if it is unmapped meanwhile.

    Raises:
        CudaDriverError: the device cannot be used.
    """
    found = _retained(address)
    return None if found is None else int(found)


def release_piece(handle: int) -> None:
    """Release a handle that `retain_piece` returned; call this once per `retain_piece`."""
    call(driver.cuMemRelease, handle)


def holds(address: int, handle: int) -> bool:
    """Return whether the piece of a retained handle is the one mapped at an address."""
    found = _retained(address)
    if found is None:
        return False
    check(driver.cuMemRelease, driver.cuMemRelease(found))
    return int(found) == handle


def share_piece(handle: int) -> int:
    """Return a descriptor by which another process can map the piece; the caller closes it.

    Raises:
        CudaDriverError: the piece was not created as shareable by descriptor.
    """
    return int(call(driver.cuMemExportToShareableHandle, handle, _DESCRIPTOR, 0))


def is_shareable(address: int) -> bool:
    """Return whether the piece mapped at an address, if any, can be mapped by another process."""
    handle = retain_piece(address)
    if handle is None:
        return False
    try:
        os.close(share_piece(handle))
    except CudaDriverError:
        return False
    finally:
        release_piece(handle)
    return True


def reserved_range(address: int) -> tuple[int, int]:
    """Return (address, bytes) of the reserved range that contains an address."""
    start = call(driver.cuPointerGetAttribute, _RANGE_START, address)
    return int(start), int(call(driver.cuPointerGetAttribute, _RANGE_SIZE, address))


class AddressRange:
    """`nbytes` of reserved addresses, into which pieces of another process are mapped.

    Raises:
        CudaDriverError: the driver cannot reserve so many addresses.
    """

    def __init__(self, nbytes: int, ordinal: int) -> None:
        """Reserve addresses; the device `ordinal` reads and writes the pieces mapped there."""
        self.nbytes = nbytes
        self.address = int(call(driver.cuMemAddressReserve, nbytes, 0, 0, 0))
        self._pieces: dict[int, int] = {}  # bytes by offset
        self._is_open = True
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = ordinal
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def map(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Map the piece of a descriptor at an offset; the descriptor may be closed afterwards.

        Raises:
            ValueError: the piece would exceed the range.
            CudaDriverError: the piece does not have `nbytes`, or something is mapped there already.
                The range is unchanged.
        """
        if offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} are not in {self.nbytes} bytes")
        address = self.address + offset
        handle = call(driver.cuMemImportFromShareableHandle, descriptor, _DESCRIPTOR)
        try:
            call(driver.cuMemMap, address, nbytes, 0, handle, 0, about=f"{nbytes} bytes")
        finally:
            call(driver.cuMemRelease, handle)  # the mapping keeps the piece
        try:
            call(driver.cuMemSetAccess, address, nbytes, [self._access], 1)
        except CudaDriverError:
            call(driver.cuMemUnmap, address, nbytes)
            raise
        self._pieces[offset] = nbytes

    def unmap(self, offset: int) -> None:
        """Unmap the piece at an offset; no stream may use it any more."""
        nbytes = self._pieces.pop(offset)
        call(driver.cuMemUnmap, self.address + offset, nbytes)

    def close(self) -> None:
        """Unmap all pieces and release the addresses; a second call does nothing."""
        while self._pieces:
            self.unmap(next(iter(self._pieces)))
        if self._is_open:
            self._is_open = False
            call(driver.cuMemAddressFree, self.address, self.nbytes)


def _retained(address: int) -> Any:
    """Return the driver's handle of the piece at an address, None if there is none.

    This runs for every tensor; `call` would take 1.5 times as long.
    """
    status, found = driver.cuMemRetainAllocationHandle(address)
    if not status:
        return found
    if status.name in _NO_PIECE:
        return None
    raise CudaDriverError("cuMemRetainAllocationHandle", status.name, hex(address))
