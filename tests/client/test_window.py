"""How much device memory offloading takes: three tensors, spare memory, never the ceiling."""

from __future__ import annotations

import pytest
from storm_client.plan import LEAST_BYTES, START_BYTES, DeviceWindow

GIB = 1 << 30


@pytest.mark.parametrize(
    ("ceiling", "limit"), [(0, 0), (GIB // 2, GIB // 2), (8 * GIB, START_BYTES)]
)
def test_the_ceiling_bounds_the_first_choice(ceiling: int, limit: int) -> None:
    assert DeviceWindow(ceiling).limit == limit


def test_three_of_the_largest_tensors_fit_below_the_ceiling() -> None:
    window = DeviceWindow(4 * GIB)
    for nbytes, limit in ((GIB // 4, START_BYTES), (GIB, 3 * GIB), (GIB // 4, 3 * GIB)):
        window.saw(nbytes)
        assert window.limit == limit
    window.saw(3 * GIB)
    assert window.limit == 4 * GIB


def test_half_of_the_spare_memory_serves_what_comes_back() -> None:
    window = DeviceWindow(4 * GIB)
    assert window.ahead(0) == START_BYTES
    assert window.ahead(5 * GIB) == 5 * GIB // 2
    assert window.ahead(100 * GIB) == 4 * GIB


def test_running_out_of_memory_halves_it_down_to_a_little() -> None:
    window = DeviceWindow(4 * GIB)
    window.saw(GIB)
    window.shrink()
    assert (window.limit, window.ahead(100 * GIB)) == (2 * GIB, 2 * GIB)
    for _ in range(10):
        window.shrink()
    assert window.limit == window.ahead(100 * GIB) == LEAST_BYTES
    window.saw(GIB)
    assert window.limit == LEAST_BYTES
