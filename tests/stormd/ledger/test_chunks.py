"""What all lanes share: element types by name."""

from __future__ import annotations

import pytest
from storm_kernels.ancf import DType

from stormd.ledger.chunks import parse_dtype


def test_types_have_names_and_whole_elements() -> None:
    for dtype in DType:
        assert parse_dtype(dtype.name.lower(), 16) is dtype
    for name in ("", "bfloat16 ", "x" * 1000):
        with pytest.raises(ValueError, match=r"is unknown: send one of .*bfloat16") as caught:
            parse_dtype(name, 16)
        assert len(str(caught.value)) < 500
    with pytest.raises(ValueError, match="7 bytes are no whole number of float32"):
        parse_dtype("float32", 7)
