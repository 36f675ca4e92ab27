"""dtypes.py: the table agrees with torch."""

from __future__ import annotations

import torch
from storm_kernels.ancf import DType, dtype_of


def test_torch_agrees():
    for dtype in set(DType) - {DType.BYTES}:
        theirs = getattr(torch, dtype.torch_name)
        assert dtype_of(theirs) is dtype
        assert dtype.item_bytes == theirs.itemsize
        assert dtype.is_complex == theirs.is_complex
        assert dtype.is_float == (theirs.is_floating_point or theirs.is_complex)
        integer = not dtype.is_float and theirs is not torch.bool
        assert dtype.is_signed_integer == (integer and theirs.is_signed)
        if dtype.is_float and not dtype.is_complex:
            assert 2.0**-dtype.mantissa_bits == torch.finfo(theirs).eps
