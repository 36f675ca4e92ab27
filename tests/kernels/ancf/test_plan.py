"""plan.py: sizes follow from plan, dtype and size alone, also beyond what memory holds."""

from __future__ import annotations

import pytest
from storm_kernels import ancf
from storm_kernels.ancf import DType, Mode
from storm_kernels.ancf.plan import Geometry, Plan, round_up

FAST = Plan(Mode.WINDOW, 0, 1, 0, 8, 3, 0)
PAIRS = Plan(Mode.SPARSE, 2, 1, 0, 8, 2, 3)


@pytest.mark.parametrize(
    ("plan", "count", "nbytes"),
    [
        (FAST, 4096, 5632),
        (FAST, 1, 176),
        (FAST, 129, 352),
        (PAIRS, 4096, 256),
        (PAIRS, 257, 32),
        (Plan(Mode.SPARSE, 1, 1, 0, 8, 2, 3), 4096, 512),
        (Plan(Mode.SPARSE, 1, 1, 0, 8, 2, 3), 129, 32),
        (Plan(Mode.INTEGER), 4096, 0),
        (Plan(Mode.VALUES, k1=9), 4096, 4608),
    ],
)
def test_fixed_blocks(plan, count, nbytes):
    assert Geometry(plan, DType.BFLOAT16, 0).block_bytes(count) == nbytes


@pytest.mark.parametrize("elements", [1, 4095, 4096, 4097, 3 << 31])
def test_parts_lie_one_after_the_other(elements):
    place = Geometry(FAST, DType.BFLOAT16, 2 * elements)
    assert place.tiles == -(-elements // 4096)
    assert place.directory_offset == 256
    assert place.fixed_offset == 256 + round_up(4 * (place.tiles + 1), 128)
    last = place.tiles - 1
    assert place.payload_offset == place.block_offset(last) + place.block_bytes(
        place.tile_elements(last)
    )


@pytest.mark.parametrize("k1", [2, 7, 8, 9])
def test_a_dictionary_apart_moves_the_directory(k1):
    mode = Mode.TERNARY if k1 == 2 else Mode.VALUES
    place = Geometry(Plan(mode, k1=k1), DType.BFLOAT16, 2)
    assert place.directory_offset == 256 + max(128, 8 << k1)


@pytest.mark.parametrize(
    ("plan", "dtype", "nbytes"),
    [
        (FAST, DType.BFLOAT16, 1),
        (Plan(Mode.WINDOW, 0, 0, 0, 7, 3, 0), DType.BFLOAT16, 2),
        (Plan(Mode.WINDOW, 0, 1, 0, 53, 3, 0), DType.FLOAT64, 2),
        (Plan(Mode.TRUNCATED, 0, 1, 16, 8, 2, 3), DType.FLOAT32, 4),
        (Plan(Mode.VALUES, k1=8), DType.INT64, 8),
        (Plan(Mode.RAW), DType.INT64, 0),
    ],
)
def test_escapes_are_as_wide_as_the_symbol_or_the_element(plan, dtype, nbytes):
    assert plan.escape_bytes(dtype) == nbytes


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Mode.WINDOW, 0, 1, 0, 8, 2, 0),
        Plan(Mode.WINDOW, 1, 1, 0, 8, 3, 0),
        Plan(Mode.WINDOW, 0, 1, 0, 9, 3, 0),
        Plan(Mode.WINDOW, 0, 2, 0, 9, 3, 0),
        Plan(Mode.WINDOW, 0, 1, 16, 8, 3, 0),
        Plan(Mode.TRUNCATED, 0, 1, 16, 8, 2, 3),
        Plan(Mode.SPARSE, 0, 1, 0, 8, 2, 3),
        Plan(Mode.SPARSE, 3, 1, 0, 8, 2, 3),
        Plan(Mode.SPARSE, 4, 0, 0, 7, 2, 3),
        Plan(Mode.SPARSE, 5, 1, 0, 8, 2, 3),
        Plan(Mode.SPARSE, 6, 0, 0, 7, 2, 3, fill=1),
        Plan(Mode.WINDOW, 4, 0, 0, 7, 2, 3),
        Plan(Mode.VALUES, k1=10),
        Plan(Mode.VALUES, k1=8, k2=3),
        Plan(Mode.RAW, k1=3),
        Plan(Mode.CONSTANT, bitmap=1),
    ],
)
def test_plans_that_no_encoder_writes(plan):
    assert plan.problem(DType.BFLOAT16)


def test_the_bound_is_the_original_and_a_header():
    assert ancf.max_encoded_bytes(1 << 40, DType.FLOAT32) == (1 << 40) + 256
