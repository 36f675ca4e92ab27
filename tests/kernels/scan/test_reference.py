"""reference.py against loops and figures written out by hand."""

from __future__ import annotations

import torch
from storm_kernels.scan import reference

PLAIN = {"reverse": False, "exclusive": False, "compensated": False}


def _fold(x: torch.Tensor, dim: int = 0, **options) -> list[float]:
    y = torch.empty_like(x)
    reference.fold(x, y, dim, **{**PLAIN, "op": "add", **options})
    return y.tolist()


def test_sums():
    x = torch.tensor([1.0, 2.0, 4.0])
    assert _fold(x) == [1, 3, 7]
    assert _fold(x, reverse=True) == [7, 6, 4]
    assert _fold(x, exclusive=True) == [0, 1, 3]
    assert _fold(x, reverse=True, exclusive=True) == [6, 4, 0]


def test_operations():
    x = torch.tensor([3, 1, 4])
    assert _fold(x, op="mul") == [3, 3, 12]
    assert _fold(x, op="max") == [3, 3, 4]
    assert _fold(x, op="min") == [3, 1, 1]
    assert _fold(x, op="max", exclusive=True)[0] == torch.iinfo(torch.int64).min


def test_neumaiers_sum_keeps_what_a_large_term_hides():
    x = torch.tensor([1.0, 1e100, 1.0, -1e100], dtype=torch.float64)
    assert _fold(x)[-1] == 0
    assert _fold(x, compensated=True)[-1] == 2
