"""escapes.py: the rate is the share of elements without a dictionary entry."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import ancf
from storm_kernels.ancf.escapes import escape_rate


def rate(tensor: torch.Tensor, **options) -> float:
    return escape_rate(ancf.encode(tensor, **options).host_data())


@pytest.mark.parametrize("speed", ["fast", "dense"])
def test_normal_numbers(speed):
    tensor = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = {"fast": 0.025, "dense": 0.0032}[speed]
    assert rate(tensor, speed=speed) == pytest.approx(expected, rel=0.15)


def test_exactly_counted():
    tensor = torch.ones(5 * 4096 + 100, dtype=torch.bfloat16)
    tensor[::8] = 2.0**100
    tensor[1::64] = torch.tensor([2.0**k for k in range(-120, 121)]).repeat(2)[: len(tensor[1::64])]
    blob = ancf.encode(tensor, mode="window")
    entries = blob.header.plan.dictionary
    symbols = (tensor.view(torch.int16).to(torch.int32) & 0xFFFF) >> 7
    known = torch.isin(symbols, torch.tensor(entries))
    assert escape_rate(blob.host_data()) == pytest.approx(1 - known.double().mean().item())


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(9), torch.arange(9000)])
def test_modes_without_a_dictionary(tensor):
    assert rate(tensor) == 0


def test_zeros_of_a_sparse_blob_do_not_count():
    tensor = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0)).relu().bfloat16()
    assert 0.001 < rate(tensor, mode="sparse") < 0.006
