"""escapes.py: the rate is the share of elements without a dictionary entry."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import ancf
from storm_kernels.ancf.escapes import escape_rate


def test_exactly_counted():
    tensor = torch.ones(5 * 4096 + 100, dtype=torch.bfloat16)
    tensor[::8] = 2.0**100
    tensor[1::64] = torch.tensor([2.0**k for k in range(-120, 121)]).repeat(2)[: len(tensor[1::64])]
    blob = ancf.encode(tensor, mode="window")
    entries = blob.header.plan.dictionary
    symbols = (tensor.view(torch.int16).to(torch.int32) & 0xFFFF) >> 7
    known = torch.isin(symbols, torch.tensor(entries))
    assert escape_rate(blob.host_data()) == pytest.approx(1 - known.double().mean().item())


def test_by_mode():
    normal = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0)).bfloat16()
    for tensor, options, least, most in (
        (normal, {"speed": "fast"}, 0.021, 0.029),
        (normal, {"speed": "dense"}, 0.0027, 0.0037),
        (normal.relu(), {"mode": "sparse"}, 0.001, 0.006),  # zeros do not count
        (torch.zeros(0), {}, 0, 0),
        (torch.zeros(9), {}, 0, 0),
        (torch.arange(9000), {}, 0, 0),
    ):
        rate = escape_rate(ancf.encode(tensor, **options).host_data())
        assert least <= rate <= most, (tensor, options)
