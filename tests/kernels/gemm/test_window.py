"""window.py: which exponents get codes."""

from __future__ import annotations

import pytest
from storm_kernels import UsageError
from storm_kernels.ancf import DType
from storm_kernels.gemm.window import geometry, window_of

SYMBOLS = {DType.BFLOAT16: 256, DType.FLOAT16: 32}


def counts_of(dtype: DType, **of: int) -> list[int]:
    counts = [0] * SYMBOLS[dtype]
    for name, count in of.items():
        counts[int(name.removeprefix("e"))] = count
    return counts


def test_the_window_holds_the_most_elements() -> None:
    """A decoder adds a code of 7 to the base before it knows that the element escaped."""
    for dtype in SYMBOLS:
        counts = counts_of(dtype, e3=50, e10=5, e11=20, e12=30, e16=30, e18=1, e20=14)
        window = window_of(counts, dtype)
        assert window.base == 10
        assert window.share == pytest.approx(1 - 85 / 150)
    assert window_of(counts_of(DType.BFLOAT16, e255=9), DType.BFLOAT16).base + 7 <= 255
    assert window_of(counts_of(DType.FLOAT16, e31=9), DType.FLOAT16).base + 7 <= 31


def test_counts_that_no_window_follows_from_are_refused() -> None:
    with pytest.raises(UsageError, match="give 256 counts"):
        window_of([1] * 32, DType.BFLOAT16)
    with pytest.raises(UsageError, match="256 counts of 0 elements"):
        window_of([0] * 256, DType.BFLOAT16)
    with pytest.raises(UsageError, match="float32 are not encoded; use bfloat16"):
        geometry(DType.FLOAT32, 4096)
