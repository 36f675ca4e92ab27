"""What all lanes share: element types by name, and the bound of a blob."""

from __future__ import annotations

import pytest
from storm_kernels.ancf import DType

from stormd.ledger.chunks import blob_bound, parse_dtype


@pytest.mark.parametrize("dtype", list(DType))
def test_every_type_of_the_codec_has_a_name(dtype: DType) -> None:
    assert parse_dtype(dtype.name.lower(), 16) is dtype


@pytest.mark.parametrize("name", ["", "float5", "bfloat16 ", "x" * 1000])
def test_an_unknown_type_is_named_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown: send one of .*bfloat16") as caught:
        parse_dtype(name, 16)
    assert len(str(caught.value)) < 500


def test_bytes_must_be_whole_elements() -> None:
    with pytest.raises(ValueError, match="7 bytes are no whole number of float32"):
        parse_dtype("float32", 7)


def test_a_blob_is_larger_than_its_content_by_a_header_at_most() -> None:
    assert blob_bound(1) == 257
