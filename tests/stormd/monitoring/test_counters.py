"""The counters: sums, rates, who counts as dead, and buckets that hold what they say."""

from __future__ import annotations

import pytest

from stormd.monitoring.counters import Counters, Histogram


def test_directions_are_summed_over_codecs() -> None:
    counters = Counters()
    counters.stores["raw"].add(1000, 1256, 0.5, 0.7)
    counters.stores["ancf"].add(3000, 1000, 1.5, 1.6)
    store = counters.throughput()["store"]
    assert (store["operations"], store["raw_bytes"], store["blob_bytes"]) == (2, 4000, 2256)
    assert store["bytes_per_second"] == 2000.0
    assert counters.throughput()["restore"]["bytes_per_second"] == 0.0
    assert sum(counters.stores["raw"].waits.counts) == 1


def test_an_ordered_end_is_no_death() -> None:
    counters = Counters()
    for cause in counters.ended:
        counters.ended[cause] += 1
    assert counters.deaths == len(counters.ended) - 2


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram()
    for seconds in (0.06, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(seconds)
    assert histogram.cumulative()[-5:] == [
        ("0.1", 2.0), ("0.25", 2.0), ("1.0", 4.0), ("5.0", 4.0), ("+Inf", 5.0),
    ]  # fmt: skip
    assert histogram.total_seconds == pytest.approx(8.66)
    assert sum(histogram.counts) == 5
