"""blob.py: a serialised tensor comes back as it was, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from storm_kernels import ancf
from storm_kernels.ancf.checksum import checksum


@pytest.fixture(scope="module")
def tensor() -> torch.Tensor:
    return torch.randn(7, 31, 11, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_properties(tensor):
    blob = ancf.encode(tensor)
    assert blob.raw_nbytes == tensor.nbytes
    assert blob.nbytes == len(blob.data) == blob.header.encoded_nbytes
    assert blob.ratio == pytest.approx(tensor.nbytes / blob.nbytes)
    assert (blob.mode, blob.dtype, blob.shape) == ("window", torch.bfloat16, tuple(tensor.shape))
    assert "bfloat16" in repr(blob)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4, 5, 6)])
def test_bytes_and_back(shape):
    for dtype in (torch.float32, torch.complex64, torch.bool, torch.int64):
        tensor = torch.ones(shape, dtype=dtype)
        for buffer in (bytes, bytearray, memoryview):
            blob = ancf.Blob.from_bytes(buffer(ancf.encode(tensor).to_bytes()))
            assert (blob.shape, blob.dtype) == (shape, dtype)
            assert torch.equal(ancf.decode(blob), tensor)


def test_every_flipped_bit_is_refused(tensor):
    data = bytearray(ancf.encode(tensor, checksum=False).to_bytes())
    places = np.random.default_rng(0).integers(0, 8 * len(data), 300)
    for bit in [*places, *range(8 * (len(data) - 48), 8 * len(data))]:
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ancf.CorruptBlob):
            ancf.Blob.from_bytes(data)
        data[bit // 8] ^= 1 << bit % 8


def test_every_truncation_is_refused(tensor):
    data = ancf.encode(tensor).to_bytes()
    for size in [*range(0, 300, 13), len(data) // 2, *range(len(data) - 60, len(data))]:
        with pytest.raises(ancf.CorruptBlob):
            ancf.Blob.from_bytes(data[:size])
    with pytest.raises(ancf.CorruptBlob):
        ancf.Blob.from_bytes(data + b"\0")


def test_a_shape_of_another_size_is_refused(tensor):
    data = bytearray(ancf.encode(tensor).to_bytes())
    data[-32:-24] = (8).to_bytes(8, "little")
    data[-8:] = checksum(np.frombuffer(data[:-8], np.uint8)).to_bytes(8, "little")
    with pytest.raises(ancf.CorruptBlob, match="shape"):
        ancf.Blob.from_bytes(data)

    data = bytearray(ancf.encode(torch.ones(0, 3, 5)).to_bytes())
    for extent in (1 << 62, 1 << 63, (1 << 64) - 1):  # that no tensor has
        data[-16:-8] = extent.to_bytes(8, "little")
        data[-8:] = checksum(np.frombuffer(data[:-8], np.uint8)).to_bytes(8, "little")
        with pytest.raises(ancf.CorruptBlob, match="no tensor can have shape"):
            ancf.Blob.from_bytes(data)
