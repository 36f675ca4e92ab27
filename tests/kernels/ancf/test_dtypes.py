"""dtypes.py: the table agrees with torch."""

from __future__ import annotations

import pytest
import torch
from storm_kernels.ancf import DType, dtype_of

NAMED = [dtype for dtype in DType if dtype is not DType.BYTES]


@pytest.mark.parametrize("dtype", NAMED)
def test_torch_agrees(dtype):
    theirs = getattr(torch, dtype.torch_name)
    assert dtype_of(theirs) is dtype
    assert dtype.item_bytes == theirs.itemsize
    assert dtype.is_complex == theirs.is_complex
    assert dtype.is_float == (theirs.is_floating_point or theirs.is_complex)
    integer = not dtype.is_float and theirs is not torch.bool
    assert dtype.is_signed_integer == (integer and theirs.is_signed)


@pytest.mark.parametrize("dtype", [d for d in NAMED if d.is_float and not d.is_complex])
def test_mantissas_agree_with_torch(dtype):
    eps = torch.finfo(getattr(torch, dtype.torch_name)).eps
    assert 2.0**-dtype.mantissa_bits == eps
