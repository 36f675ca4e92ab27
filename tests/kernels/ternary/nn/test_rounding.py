"""Rounding to ternary: what layers use is what TernaryTensor.from_float does."""

from __future__ import annotations

import torch
from storm_kernels.ternary import TernaryTensor
from storm_kernels.ternary.nn.rounding import rounded_rows, rounded_signs


def test_weights_are_rounded_as_tensors_are():
    values = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    for group in (None, 32):
        signs, scale = rounded_rows(values, group)
        tensor = TernaryTensor.from_float(values, group=group)
        assert torch.equal(signs, tensor.decode())
        assert torch.equal(scale, tensor.scale)


def test_each_row_has_a_threshold_of_its_own():
    x = torch.tensor([[1.0, -1.0, 0.1, 0.0], [100.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    signs, scale = rounded_signs(x)
    assert signs.tolist() == [[1, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert scale.tolist() == [[1.0], [100.0], [0.0]]
