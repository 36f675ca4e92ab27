"""The counters: sums, rates, and who counts as dead."""

from __future__ import annotations

import json

from stormd.counters import Counters


def test_directions_are_summed_over_codecs() -> None:
    counters = Counters()
    counters.stores["raw"].add(1000, 1256, 0.5, 0.7)
    counters.stores["ancf"].add(3000, 1000, 1.5, 1.6)
    store = counters.throughput()["store"]
    assert (store["operations"], store["raw_bytes"], store["blob_bytes"]) == (2, 4000, 2256)
    assert store["bytes_per_second"] == 2000.0
    assert counters.throughput()["restore"]["bytes_per_second"] == 0.0
    assert counters.stores["raw"].waits.count == 1


def test_an_ordered_end_is_no_death() -> None:
    counters = Counters()
    for cause in counters.ended:
        counters.ended[cause] += 1
    assert counters.deaths == len(counters.ended) - 2


def test_the_status_is_json() -> None:
    counters = Counters()
    json.dumps([counters.as_status(), counters.throughput()])
