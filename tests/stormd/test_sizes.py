"""Sizes read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormd.errors import ConfigError
from stormd.sizes import exact_size, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17B", 17),
        ("4GiB", 4 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
        ("2TiB", 2 << 40),
    ],
)
def test_reads(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "4GB", "-1MiB", "4gib", "1e9", "0.3KiB", "GiB", "1.GiB", "4 G"]
)
def test_refuses_what_is_no_exact_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"KiB|smaller unit"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_exact_size_reads_back(nbytes: int) -> None:
    assert parse_size(exact_size(nbytes)) == nbytes


def test_formats_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
