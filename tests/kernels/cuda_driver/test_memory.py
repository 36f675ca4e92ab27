"""Memory objects hold valid memory, give it back once, and name what failed."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from storm_kernels.errors import CudaDriverError
from support.cuda_only import cuda_only

pytestmark = cuda_only

PAGE = 4096


def test_a_buffer_is_exportable_and_has_an_id_of_its_own() -> None:
    from storm_kernels.cuda_driver import HANDLE_BYTES, DeviceBuffer, buffer_id, exportable

    one, other = DeviceBuffer(1 << 21), DeviceBuffer(1 << 21)
    assert len(one.ipc_handle()) == HANDLE_BYTES
    assert exportable(one.address)
    assert buffer_id(one.address) != buffer_id(other.address)
    for buffer in (one, other, one):
        buffer.close()


def test_an_allocation_that_is_too_large_says_so() -> None:
    from storm_kernels.cuda_driver import DeviceBuffer

    with pytest.raises(CudaDriverError, match=r"cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceBuffer(1 << 50)


def test_a_handle_of_this_process_or_of_nobody_is_refused() -> None:
    from storm_kernels.cuda_driver import DeviceBuffer, IpcMapping

    buffer = DeviceBuffer(1 << 21)
    with pytest.raises(CudaDriverError, match="cuIpcOpenMemHandle"):
        IpcMapping(buffer.ipc_handle())
    buffer.close()
    with pytest.raises(ValueError, match="64 bytes, not 3"):
        IpcMapping(b"abc")


def test_registered_memory_is_split_where_its_pieces_meet() -> None:
    from storm_kernels.cuda_driver import RegisteredHost

    memory = mmap.mmap(-1, 4 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    registered = RegisteredHost(address, 4 * PAGE, piece_bytes=PAGE)
    assert registered.pieces(PAGE - 8, PAGE + 16) == [
        (address + PAGE - 8, 8),
        (address + PAGE, PAGE),
        (address + 2 * PAGE, 8),
    ]
    registered.close()
    registered.close()
    memory.close()


def test_a_device_writes_where_the_cpu_reads() -> None:
    from storm_kernels.cuda_driver import MappedHost, write_value

    mapped = MappedHost(64)
    words = mapped.words()
    assert list(words) == [0] * 8
    write_value(torch.cuda.current_stream().cuda_stream, mapped.device_address + 8, 77)
    torch.cuda.synchronize()
    assert words[1] == 77
    mapped.close()
