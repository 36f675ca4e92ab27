"""The oracle itself: against plain sums in NumPy, and against the order of summation in words."""

from __future__ import annotations

import numpy as np
import pytest
from storm_kernels import CorruptBlob
from storm_kernels.ternary import reference
from storm_kernels.ternary.planes import Kind, Product

from .conftest import planes, ternary


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 100])
def test_floats_are_summed_by_lanes_and_then_by_halves(columns):
    """Bit for bit what a reader of DESIGN.md would write, one value at a time."""
    w, x = ternary(3, columns), np.random.default_rng(columns).standard_normal((2, columns))
    x = x.astype(np.float32)
    found = reference.multiply(Product(*planes(w), columns, x, Kind.FLOAT32))
    for b in range(2):
        for row in range(3):
            lanes = [np.float32(0)] * 32
            for column in range(columns):
                if w[row, column]:
                    lanes[column % 32] += w[row, column] * x[b, column]
            for half in (16, 8, 4, 2, 1):
                lanes = [lanes[i] + lanes[i + half] for i in range(half)]
            assert found[b, row].tobytes() == lanes[0].tobytes()


def test_zero_weights_skip_what_is_not_finite():
    w = np.array([[0, 1, -1]], np.int8)
    x = np.array([[np.nan, 2, 3]], np.float32)
    assert reference.multiply(Product(*planes(w), 3, x, Kind.FLOAT32)).tolist() == [[-1.0]]


def test_integers_are_exact_where_float32_would_not_be():
    columns = 140_001
    w = np.ones((1, columns), np.int8)
    x = np.full((1, columns), 127, np.int8)
    x[0, 0] = 126
    found = reference.multiply(Product(*planes(w), columns, x, Kind.INT8))
    assert found.tolist() == [[127 * columns - 1]]


def test_of_256_bytes_243_stand_for_five_values():
    good = 0
    for byte in range(256):
        try:
            bit0, bit1 = reference.unpack(np.array([byte], np.uint8), 5)
        except CorruptBlob:
            continue
        good += 1
        assert reference.pack(bit0[0], bit1[0], 5).tolist() == [byte]
    assert good == 3**5
