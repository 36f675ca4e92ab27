"""Sizes without the daemon: a client reads them too, and gets an error of Python's own."""

from __future__ import annotations

import pytest

from stormd.protocol.sizes import parse_size


def test_a_size_is_read() -> None:
    assert parse_size("1.5GiB") == 3 << 29


@pytest.mark.parametrize("text", ["4GB", "much", "0.3B"])
def test_no_size_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' "):
        parse_size(text)
