"""figures.py: the bound is the entropy, and no encoding is below it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from storm_bench.activations.figures import bound_bits, tensor_figures
from storm_kernels.ancf import DType


def test_figures_of_a_tensor() -> None:
    tensor = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    figures = tensor_figures(tensor)
    assert figures.raw_nbytes == 1 << 18
    assert figures.bound_nbytes < figures.dense_nbytes < figures.fast_nbytes < figures.raw_nbytes


def test_bound_of_normal_numbers() -> None:
    found = tensor_figures(torch.randn(1 << 17).bfloat16())
    assert found.raw_nbytes / found.bound_nbytes == pytest.approx(1.517, abs=0.01)


def test_bound_by_hand() -> None:
    for elements, bits in (
        (np.zeros(0, "<u2"), 0),
        (np.zeros(100, "<u2"), 0),
        (np.array([0, 0, 0x3F80, 0x4000], "<u2"), 1 + 0.5 * (1 + 7)),
        (np.array([0x3F80, 0xBF80], "<u2"), 1 + 7),
        (np.array([0, 0x8000, 0, 0x8000], "<u2"), 1),
        (np.array([0, 0x8000, 0x3F80, 0xBF80], "<u2"), 2 + 0.5 * 7),
    ):
        assert bound_bits(elements, DType.BFLOAT16) == pytest.approx(bits), elements
    assert bound_bits(np.arange(256, dtype="<u8"), DType.INT64) == pytest.approx(8)


def test_low_bits_that_are_never_set_are_free() -> None:
    short = torch.randn(10_000).bfloat16()
    of_both = [tensor_figures(one).bound_nbytes for one in (short, short.float())]
    assert of_both[0] == pytest.approx(of_both[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_is_within_six_percent_of_the_bound(dtype: torch.dtype) -> None:
    noise = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
    gelu, silu = torch.nn.functional.gelu(noise), torch.nn.functional.silu(noise)
    masked = noise * (noise.flip(0) > 0.67)
    relu, gated = noise.relu(), silu * noise.flip(0)
    for tensor in (noise, masked, relu, relu.square(), gelu, silu, gated):
        found = tensor_figures(tensor.to(dtype))
        assert 0.94 * found.dense_nbytes < found.bound_nbytes < found.dense_nbytes
