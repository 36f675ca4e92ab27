"""Buckets hold what they say, cumulatively."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormd.histogram import WAIT_BOUNDS, Histogram


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(seconds)
    assert histogram.cumulative() == [("0.1", 2.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total_seconds == pytest.approx(8.65)
    assert histogram.count == 5


@given(st.lists(st.floats(0, 100)))
def test_cumulative_counts_are_counts_below(seconds: list[float]) -> None:
    histogram = Histogram()
    for value in seconds:
        histogram.observe(value)
    wanted = [float(sum(value <= bound for value in seconds)) for bound in WAIT_BOUNDS]
    assert [count for _, count in histogram.cumulative()] == [*wanted, float(len(seconds))]


def test_bounds_ascend() -> None:
    assert list(WAIT_BOUNDS) == sorted(set(WAIT_BOUNDS))
