"""Ranges of addresses, and pieces of memory that are mapped into them, on the fake devices.

What stays true: a piece is there until it is mapped nowhere and no handle of it is retained; then
its handle may be the next one's. A range keeps its addresses whatever is mapped. All pieces have
one buffer id, which says nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import count

from storm_kernels.errors import CudaDriverError
from support import fake_cuda
from support.fake_device_memory import Range

_ANYWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED = 0x10
_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_pieces: dict[int, _Physical] = {}
"""By handle, all that there are."""
_ranges: list[_Reserved] = []


def _error(function: str, about: str, code: str = "INVALID_VALUE") -> CudaDriverError:
    return CudaDriverError(function, f"CUDA_ERROR_{code}", about)


class _Physical:
    """A piece's memory, with how many mappings and retained handles keep it."""

    def __init__(self, device: int, nbytes: int, *, shareable: bool) -> None:
        self.device, self.nbytes, self.shareable = device, nbytes, shareable
        self.file = os.memfd_create("fake-piece")
        os.truncate(self.file, nbytes)
        self.handle = next(number for number in count(1) if number not in _pieces)
        self.users = 1
        _pieces[self.handle] = self
        fake_cuda.live.add(self)

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            del _pieces[self.handle]
            os.close(self.file)
            fake_cuda.live.discard(self)


class _Reserved(fake_cuda._Owned):
    """Reserved addresses, and what is mapped at them."""

    def __init__(self, nbytes: int) -> None:
        self.device = fake_cuda._called("cuMemAddressReserve")
        super().__init__()
        self.nbytes = nbytes
        self.address = _libc.mmap(None, nbytes, _PROT_NONE, _ANYWHERE, -1, 0)
        self.mapped: dict[int, tuple[_Physical, Range]] = {}  # by offset
        _ranges.append(self)

    def put(self, piece: _Physical, offset: int, nbytes: int) -> None:
        end = offset + nbytes
        is_taken = any(
            at < end and offset < at + one.nbytes for at, (one, _) in self.mapped.items()
        )
        if nbytes != piece.nbytes or is_taken or end > self.nbytes or piece.device != self.device:
            raise _error("cuMemMap", f"{nbytes} bytes at {offset}")
        address = self.address + offset
        flags = mmap.MAP_SHARED | _MAP_FIXED
        assert _libc.mmap(address, nbytes, _READ_WRITE, flags, piece.file, 0) == address
        made = Range(address, nbytes, self.device, piece)
        self.mapped[offset] = piece, made
        piece.users += 1
        fake_cuda._memory.add(made)

    def unmap(self, offset: int) -> None:
        piece, made = self.mapped.pop(offset)
        fake_cuda._memory.remove(made, "a piece")
        flags = _ANYWHERE | _MAP_FIXED
        _libc.mmap(made.begin, made.nbytes, _PROT_NONE, flags, -1, 0)
        piece.release()

    def close(self) -> None:
        for offset in list(self.mapped):
            self.unmap(offset)
        if self._is_open:
            _ranges.remove(self)
            _libc.munmap(self.address, self.nbytes)
        super().close()


class ExpandableSegment(_Reserved):
    """A range as PyTorch has it, which makes the pieces that it maps."""

    def map(self, offset: int, nbytes: int, *, shareable: bool = True) -> None:
        piece = _Physical(self.device, nbytes, shareable=shareable)
        self.put(piece, offset, nbytes)
        piece.release()

    def bytes(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        return (ctypes.c_uint8 * nbytes).from_address(self.address + offset)


class AddressRange(_Reserved):
    """A range as the daemon has it, into which other processes' pieces are mapped."""

    def __init__(self, nbytes: int, ordinal: int) -> None:
        super().__init__(nbytes)
        assert self.device == ordinal

    def map(self, descriptor: int, offset: int, nbytes: int) -> None:
        fake_cuda._called("cuMemImportFromShareableHandle")
        node = os.fstat(descriptor).st_ino
        found = [one for one in _pieces.values() if os.fstat(one.file).st_ino == node]
        if not found:
            raise _error("cuMemImportFromShareableHandle", "it is no piece")
        self.put(found[0], offset, nbytes)


def _mapped(address: int) -> tuple[_Physical, int, _Reserved] | None:
    """Return the piece at an address, where its mapping begins, and the range that it is in."""
    fake_cuda._called("cuMemRetainAllocationHandle")
    for one in _ranges:
        for offset, (piece, _) in one.mapped.items():
            begin = one.address + offset
            if begin <= address < begin + piece.nbytes:
                return piece, begin, one
    return None


def retain_piece(address: int) -> int | None:
    found = _mapped(address)
    if found is None:
        return None
    found[0].users += 1
    return found[0].handle


def release_piece(handle: int) -> None:
    _pieces[handle].release()


def holds(address: int, handle: int) -> bool:
    found = _mapped(address)
    return found is not None and found[0].handle == handle


def share_piece(handle: int) -> int:
    if not _pieces[handle].shareable:
        raise _error("cuMemExportToShareableHandle", "of another type")
    return os.dup(_pieces[handle].file)


def is_shareable(address: int) -> bool:
    found = _mapped(address)
    return found is not None and found[0].shareable


def reserved_range(address: int) -> tuple[int, int]:
    found = _mapped(address)
    return found[2].address, found[2].nbytes


def allocation(address: int) -> tuple[int, int]:
    found = _mapped(address)
    return fake_cuda.allocation(address) if found is None else (found[1], found[0].nbytes)


def buffer_id(address: int) -> int:
    return fake_cuda.buffer_id(address) if _mapped(address) is None else 0


def exportable(address: int) -> bool:
    return _mapped(address) is None and fake_cuda.exportable(address)
