"""Sizes without the daemon: a client reads them too, and gets an error of Python's own."""

from __future__ import annotations

import pytest

from stormd.protocol.sizes import format_apart, parse_size, suggested_pool


@pytest.mark.parametrize("text", ["4GB", "much", "0.3B"])
def test_no_size_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' "):
        parse_size(text)


def test_two_sizes_that_would_look_alike_are_shown_in_bytes() -> None:
    assert format_apart(1 << 20, 1 << 21) == ("1.0 MiB", "2.0 MiB")
    assert format_apart(32 << 20, (32 << 20) + 4) == ("33554432 bytes", "33554436 bytes")


@pytest.mark.parametrize(
    ("nbytes", "pool"),
    [(0, 64 << 20), (1, 64 << 20), (100 << 20, 128 << 20), (3 << 30, 4 << 30), (4 << 30, 5 << 30)],
)
def test_a_suggested_pool_has_a_quarter_to_spare(nbytes: int, pool: int) -> None:
    assert suggested_pool(nbytes) == pool
