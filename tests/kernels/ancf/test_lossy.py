"""lossy.py: nothing moves further than the tolerance, and what cannot move keeps its bits."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import ancf

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def normal(dtype: torch.dtype, count: int = 12_000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_error_stays_within_the_tolerance_and_special_values_are_exact(dtype):
    tensor = normal(dtype)
    for tolerance in (1e-6, 1e-3, 0.01, 0.1, 10.0):
        for policy in ("conservative", "adaptive", "aggressive"):
            same = ancf.decode(ancf.encode(tensor, "values", tolerance=tolerance, policy=policy))
            error = (same.double() - tensor.double()).abs().max()
            assert error <= tolerance, (tolerance, policy)
    tensor[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 60_000.0])
    tensor[4] = (
        torch.tensor([-1], dtype=torch.int64).view(torch.uint8)[: tensor.itemsize].view(dtype)
    )
    same = ancf.decode(ancf.encode(tensor, tolerance=0.05, mode="values"))
    assert torch.equal(same[:5].view(torch.uint8), tensor[:5].view(torch.uint8))


def test_it_pays_or_the_lossless_blob_is_taken():
    tensor = normal(torch.float32, 1 << 16)
    assert ancf.encode(tensor, tolerance=0.02).ratio > 2.5
    assert ancf.encode(tensor, tolerance=1e-9).mode == "window"


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_stay_within_a_circle(dtype):
    noise = torch.randn(20_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tensor = torch.view_as_complex(noise).to(dtype)
    same = ancf.decode(ancf.encode(tensor, tolerance=0.05, mode="values"))
    error = (same.to(torch.complex128) - tensor.to(torch.complex128)).abs().max()
    assert 0.025 < error <= 0.05


def test_tensors_without_centres():
    for tensor in (torch.empty(0), torch.full((9,), torch.nan), torch.zeros(9)):
        same = ancf.decode(ancf.encode(tensor, tolerance=0.5))
        assert torch.equal(same.nan_to_num(7), tensor.nan_to_num(7))


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (torch.randn(4), {"tolerance": -1.0}, "-1.0"),
        (torch.randn(4), {"tolerance": "1e-3"}, "tolerance '1e-3' must be 0"),
        (torch.randn(4), {"tolerance": float("nan")}, "nan"),
        (torch.randn(4), {"tolerance": 0.1, "mode": "window"}, "'window'"),
        (torch.arange(4), {"tolerance": 0.1}, "int64"),
    ],
)
def test_requests_that_make_no_sense(tensor, options, message):
    with pytest.raises(ancf.UsageError, match=message):
        ancf.encode(tensor, **options)
