"""Pieces of PyTorch's expandable segments: known by their handles, and mapped a second time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from support.cuda_only import cuda_only

pytestmark = cuda_only

PIECES = 3
NBYTES = PIECES * (20 << 20) - (1 << 20)


@pytest.fixture
def tensor() -> Iterator[torch.Tensor]:
    """One that spans several pieces, which nothing else lies in."""
    settings = torch.cuda.memory._set_allocator_settings
    torch.cuda.empty_cache()
    settings("expandable_segments:True")
    yield torch.arange(NBYTES // 4, dtype=torch.int32, device="cuda")
    settings("expandable_segments:False")
    torch.cuda.empty_cache()


@pytest.mark.alone
def test_a_piece_is_told_from_what_is_mapped_there_next(tensor: torch.Tensor) -> None:
    from storm_kernels.cuda_driver import (
        allocation,
        exportable,
        holds,
        is_shareable,
        release_piece,
        reserved_range,
        retain_piece,
    )

    address, device = tensor.data_ptr(), tensor.device
    assert not exportable(address)
    assert is_shareable(address)
    first, reserved = reserved_range(address)
    begin, nbytes = allocation(address)
    assert first <= begin <= address < begin + nbytes <= first + reserved
    handle = retain_piece(address)
    assert handle is not None
    assert holds(begin, handle)
    assert not holds(begin + nbytes, handle)
    tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    assert not holds(begin, handle)
    again = torch.empty(NBYTES, dtype=torch.uint8, device=device)
    assert not holds(again.data_ptr(), handle)
    free, _ = torch.cuda.mem_get_info()
    release_piece(handle)
    assert torch.cuda.mem_get_info()[0] >= free + nbytes


def test_memory_of_cudamalloc_is_no_piece() -> None:
    from storm_kernels.cuda_driver import is_shareable, retain_piece

    tensor = torch.ones(1 << 20, device="cuda")
    assert retain_piece(tensor.data_ptr()) is None
    assert not is_shareable(tensor.data_ptr())


def test_pieces_lie_side_by_side_in_another_range(tensor: torch.Tensor) -> None:
    from storm_kernels.cuda_driver import (
        AddressRange,
        allocation,
        copy_async,
        release_piece,
        reserved_range,
        retain_piece,
        share_piece,
    )

    first, reserved = reserved_range(tensor.data_ptr())
    made = AddressRange(reserved, tensor.get_device())
    reached, mapped = tensor.data_ptr(), []
    while reached < tensor.data_ptr() + NBYTES:
        handle = retain_piece(reached)
        assert handle is not None
        descriptor = share_piece(handle)
        release_piece(handle)
        begin, nbytes = allocation(reached)
        made.map(descriptor, begin - first, nbytes)
        os.close(descriptor)
        mapped.append(begin - first)
        reached = begin + nbytes
    assert len(mapped) >= PIECES
    copied = torch.empty_like(tensor)
    source = made.address + tensor.data_ptr() - first
    torch.cuda.synchronize()
    copy_async(copied.data_ptr(), source, NBYTES, torch.cuda.current_stream().cuda_stream)
    assert torch.equal(copied, tensor)
    torch.cuda.synchronize()
    made.unmap(mapped[0])
    made.close()
    made.close()


def test_what_is_no_piece_is_refused(tensor: torch.Tensor) -> None:
    from storm_kernels.cuda_driver import AddressRange, release_piece, retain_piece, share_piece
    from storm_kernels.errors import CudaDriverError

    made = AddressRange(64 << 20, tensor.get_device())
    file = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(CudaDriverError, match="cuMemImportFromShareableHandle"):
        made.map(file, 0, 2 << 20)
    os.close(file)
    handle = retain_piece(tensor.data_ptr())
    assert handle is not None
    descriptor = share_piece(handle)
    release_piece(handle)
    with pytest.raises(CudaDriverError, match="cuMemMap"):
        made.map(descriptor, 0, 40 << 20)  # more than there is of it
    with pytest.raises(ValueError, match="are not in"):
        made.map(descriptor, 64 << 20, 2 << 20)
    os.close(descriptor)
    made.close()
