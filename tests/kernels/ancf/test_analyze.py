"""analyze.py: the bound is the entropy, and no mode beats it where it is one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from storm_kernels import ancf
from storm_kernels.ancf import dtype_of
from storm_kernels.ancf.analyze import bound_bits


def test_bound_of_normal_numbers():
    found = ancf.analyze(torch.randn(1 << 17).bfloat16())
    assert found.bound == pytest.approx(1.517, abs=0.01)
    assert found.chosen == "window"
    assert "window" in found.reason


def test_bound_by_hand():
    for elements, bits in (
        (np.zeros(0, "<u2"), 0),
        (np.zeros(100, "<u2"), 0),
        (np.array([0, 0, 0x3F80, 0x4000], "<u2"), 1 + 0.5 * (1 + 7)),
        (np.array([0x3F80, 0xBF80], "<u2"), 1 + 7),
        (np.array([0, 0x8000, 0, 0x8000], "<u2"), 1),
        (np.array([0, 0x8000, 0x3F80, 0xBF80], "<u2"), 2 + 0.5 * 7),
    ):
        assert bound_bits(elements, ancf.DType.BFLOAT16) == pytest.approx(bits), elements
    assert bound_bits(np.arange(256, dtype="<u8"), ancf.DType.INT64) == pytest.approx(8)
    assert math.isinf(ancf.analyze(torch.zeros(1000)).bound)


def test_low_bits_that_are_never_set_are_free():
    short = torch.randn(10_000).bfloat16()
    assert ancf.analyze(short.float()).bound == pytest.approx(2 * ancf.analyze(short).bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_is_within_six_percent_of_the_bound(dtype):
    noise = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
    gelu, silu = torch.nn.functional.gelu(noise), torch.nn.functional.silu(noise)
    masked = noise * (noise.flip(0) > 0.67)
    relu, gated = noise.relu(), silu * noise.flip(0)
    for tensor in (noise, masked, relu, relu.square(), gelu, silu, gated):
        elements = tensor.to(dtype).view(torch.uint8).numpy().view(f"<u{dtype.itemsize}")
        bound = 8 * dtype.itemsize / bound_bits(elements, dtype_of(dtype))
        assert 0.94 * bound < ancf.encode(tensor.to(dtype), speed="dense").ratio < bound


def test_every_mode_is_tried_and_the_choice_has_a_reason():
    found = ancf.analyze(torch.randn(5000).relu())
    assert {one.asked for one in found.candidates} == {mode.name.lower() for mode in ancf.Mode}
    assert max(one.ratio for one in found.candidates) >= found.chosen_ratio > 1
    assert found.chosen == "sparse"
    for tensor, reason in (
        (torch.zeros(0), "nothing"),
        (torch.ones(100), "equal"),
        (torch.ones(100, dtype=torch.bool), "0 or 1"),
        (torch.arange(3000) % 3 * 0.5, "three distinct"),
        (torch.arange(3000), "integer"),
        (torch.zeros(10**5).index_fill_(0, torch.tensor([50]), 1.0), "whole tensor"),
    ):
        found = ancf.analyze(tensor)
        assert reason in found.reason
        assert found.reason in str(found)
