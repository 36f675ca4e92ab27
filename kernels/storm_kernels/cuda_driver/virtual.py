"""Memory that is mapped piece by piece into a range of addresses, and its way to another process.

A process reserves addresses, makes pieces of memory, and maps each at an address of its choice: so
do PyTorch's expandable segments. A piece is freed when it is unmapped everywhere, each handle that
was retained has been released, and each descriptor closed. As long as a handle is retained no other
piece has the same one.
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
"""What the driver says of an address at which no piece is mapped."""


def retain_piece(address: int) -> int | None:
    """Return the handle of the piece that is mapped at an address, None where there is none.

    The piece is kept until `release_piece`, also where it is unmapped meanwhile.

    Raises:
        CudaDriverError: the device cannot be used.
    """
    found = _retained(address)
    return None if found is None else int(found)


def release_piece(handle: int) -> None:
    """Give up what `retain_piece` has returned once."""
    call(driver.cuMemRelease, handle)


def holds(address: int, handle: int) -> bool:
    """Tell whether the piece of a handle that is retained is what is mapped at an address."""
    found = _retained(address)
    if found is None:
        return False
    check(driver.cuMemRelease, driver.cuMemRelease(found))
    return int(found) == handle


def share_piece(handle: int) -> int:
    """Return a descriptor by which another process can map the piece; the caller closes it.

    Raises:
        CudaDriverError: the piece was not made to be shared so.
    """
    return int(call(driver.cuMemExportToShareableHandle, handle, _DESCRIPTOR, 0))


def is_shareable(address: int) -> bool:
    """Tell whether a piece is mapped at an address that another process can map as well."""
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
    """Return (address, bytes) of the reserved addresses that one of them lies in."""
    start = call(driver.cuPointerGetAttribute, _RANGE_START, address)
    return int(start), int(call(driver.cuPointerGetAttribute, _RANGE_SIZE, address))


class AddressRange:
    """`nbytes` of reserved addresses, into which pieces of another process are mapped.

    Raises:
        CudaDriverError: there are not so many addresses.
    """

    def __init__(self, nbytes: int, ordinal: int) -> None:
        """Reserve addresses whose pieces the device of `ordinal` reads and writes."""
        self.nbytes = nbytes
        self.address = int(call(driver.cuMemAddressReserve, nbytes, 0, 0, 0))
        self._pieces: dict[int, int] = {}  # bytes by offset
        self._is_open = True
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = ordinal
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def map(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Map the piece of a descriptor, which may be closed then, at an offset.

        Raises:
            ValueError: it would not lie in the range.
            CudaDriverError: it is no piece of `nbytes`, or something is mapped there. Nothing is
                mapped that was not before.
        """
        if offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} are not in {self.nbytes} bytes")
        address = self.address + offset
        handle = call(driver.cuMemImportFromShareableHandle, descriptor, _DESCRIPTOR)
        try:
            call(driver.cuMemMap, address, nbytes, 0, handle, 0, about=f"{nbytes} bytes")
        finally:
            call(driver.cuMemRelease, handle)  # what is mapped is kept
        try:
            call(driver.cuMemSetAccess, address, nbytes, [self._access], 1)
        except CudaDriverError:
            call(driver.cuMemUnmap, address, nbytes)
            raise
        self._pieces[offset] = nbytes

    def unmap(self, offset: int) -> None:
        """Unmap the piece at an offset; no stream uses it any more."""
        nbytes = self._pieces.pop(offset)
        call(driver.cuMemUnmap, self.address + offset, nbytes)

    def close(self) -> None:
        """Unmap all pieces and give the addresses back; twice is fine."""
        while self._pieces:
            self.unmap(next(iter(self._pieces)))
        if self._is_open:
            self._is_open = False
            call(driver.cuMemAddressFree, self.address, self.nbytes)


def _retained(address: int) -> Any:
    """Return the driver's handle, None where there is none.

    Asked for every tensor, where `call` would take half as long again.
    """
    status, found = driver.cuMemRetainAllocationHandle(address)
    if not status:
        return found
    if status.name in _NO_PIECE:
        return None
    raise CudaDriverError("cuMemRetainAllocationHandle", status.name, hex(address))
