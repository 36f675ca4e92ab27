"""launches.py: tiles that cover any shape, within what a block and a tile of Triton may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storm_kernels.scan.launches import Columns, Rows, columns_for, rows_for

SIZES = st.integers(1, 1 << 22)
MAX_ELEMENTS = 1 << 16


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


WORDS = st.sampled_from([1, 2, 4])


@given(SIZES, SIZES, SIZES, st.sampled_from([1, 2, 4, 8]), WORDS)
def test_columns(outer, length, inner, itemsize, words):
    tile = columns_for(outer, length, inner, itemsize, words=words)
    for size in (tile.rows, tile.stretches, tile.channels, tile.warps, tile.fan):
        assert _is_power_of_two(size)
    assert tile.length * tile.channels <= MAX_ELEMENTS
    assert tile.channels < 2 * inner
    assert tile.look_back or tile.length < 2 * length or tile.length == 1


@given(SIZES, SIZES, WORDS, st.booleans())
def test_rows(outer, length, words, gradient):
    tile = rows_for(outer, length, words=words, gradient=gradient)
    assert _is_power_of_two(tile.elements)
    assert _is_power_of_two(tile.fan)
    assert tile.elements <= MAX_ELEMENTS


def test_no_two_threads_may_look_at_the_same_word():
    with pytest.raises(AssertionError):
        Columns(4, 2, 8, 4, look_back=True, fan=8)
    with pytest.raises(AssertionError):
        Rows(256, 2, look_back=True, fan=32)
