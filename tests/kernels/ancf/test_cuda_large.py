"""Tensors of more than 2^31 elements on a CUDA device: offsets that need 64 bits, in every kernel.

Slow: a tensor has 2 to 4 GiB, and its blob and what is decoded take as much again.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from storm_kernels import ancf, backends
from storm_kernels.ancf import DType, max_encoded_bytes

COUNT = (1 << 31) + 4096 + 5
PIECE = 1 << 28  # elements made and compared at a time
NEEDED_BYTES = 24 << 30

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not backends()["cuda"].available, reason=backends()["cuda"].detail),
]


def made_of(dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose pieces differ, so that no piece can stand in for another."""
    generator = torch.Generator("cuda").manual_seed(5)
    tensor = torch.empty(COUNT, dtype=dtype, device="cuda")
    for number, piece in enumerate(tensor.split(PIECE)):
        if dtype is torch.bfloat16:
            piece.normal_(generator=generator).mul_(2.0 ** (number % 3))
        elif dtype is torch.bool:
            piece.copy_(torch.rand(piece.shape, device="cuda", generator=generator) < 0.1)
        else:
            piece.random_(number, number + 20, generator=generator)
    return tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    pieces = zip(a.view(torch.uint8).split(PIECE), b.view(torch.uint8).split(PIECE), strict=True)
    return all(torch.equal(one, other) for one, other in pieces)


@pytest.mark.parametrize(
    ("kind", "speed", "mode"),
    [
        (torch.uint8, "fast", "integer"),
        (torch.bool, "fast", "boolean"),
        (torch.bfloat16, "fast", "window"),
        (torch.bfloat16, "dense", "window"),
    ],
)
def test_more_than_two_to_the_31_elements(kind, speed, mode):
    if torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip(f"less than {NEEDED_BYTES >> 30} GiB of GPU memory are free")
    tensor = made_of(kind)
    blob = ancf.encode(tensor, speed=speed)
    assert blob.mode == mode
    assert blob.nbytes < 0.9 * tensor.nbytes
    same = torch.empty_like(tensor)
    same.view(torch.uint8).fill_(0xA5)
    ancf.decode(blob, out=same)
    assert same_bits(same, tensor)


def test_the_blob_is_the_c_librarys():
    if not backends()["cpu"].available:
        pytest.skip(backends()["cpu"].detail)
    tensor = made_of(torch.uint8)
    blob = ancf.encode(tensor)
    data = tensor.cpu().numpy()
    target = np.empty(max_encoded_bytes(data.size, DType.UINT8), np.uint8)
    size = ancf.host_backend("cpu").encode_into(
        data.ctypes.data, data.size, DType.UINT8, target.ctypes.data, target.size
    )
    assert size == blob.nbytes
    assert bool((blob.data.cpu().numpy() == target[:size]).all())
