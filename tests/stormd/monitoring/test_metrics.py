"""The exposition as a scraper reads it: the declared families, and the daemon's numbers."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.exposition import collector, families

from stormd.monitoring.counters import ENDINGS, Counters
from stormd.monitoring.metrics import health_route, metrics_route
from stormd.protocol import CODECS, DEVICES, REJECTIONS


@pytest.fixture
def registry() -> CollectorRegistry:
    counters = Counters()
    counters.stores["ancf"].add(raw_bytes=100, blob_bytes=70, seconds=0.25, waited=0.002)
    counters.restores["raw"].failures += 2
    counters.rejected["quota"] += 5
    counters.ended["died"] += 1
    counters.sessions += 4
    counters.cache.evictions += 6
    found = CollectorRegistry()
    found.register(collector(counters, stuck=("cpu-0 is stuck",)))
    return found


STORES = {"direction": "store", "codec": "ancf"}
WORKER = {"worker": "1", "devices": "cuda:1 cuda:3"}
VALUES: list[tuple[str, dict[str, str], float | None]] = [
    ("stormd_build_info", {"version": "1.2.3"}, 1),
    ("stormd_pool_bytes", {}, 4096),
    ("stormd_pool_committed_bytes", {}, 2048),
    ("stormd_pool_used_bytes", {}, 1000),
    ("stormd_entries_raw_bytes", {}, 1440),
    ("stormd_sessions", {"device": "cpu"}, 2),
    ("stormd_user_used_bytes", {"uid": "7"}, 900),
    ("stormd_stuck_workers", {}, 1),
    ("stormd_link_bytes_total", {"gpu": "cuda:0", "direction": "store"}, 700),
    ("stormd_link_busy_seconds_total", {"gpu": "cuda:0", "direction": "store"}, 1.5),
    ("stormd_gpu_busy_ratio", {"gpu": "cuda:0"}, 0.4),
    ("stormd_gpu_busy_ratio", {"gpu": "cuda:1"}, None),
    ("stormd_operations_total", STORES, 1),
    ("stormd_raw_bytes_total", STORES, 100),
    ("stormd_stored_bytes_total", STORES, 70),
    ("stormd_work_seconds_total", STORES, 0.25),
    ("stormd_failures_total", {"direction": "restore", "codec": "raw"}, 2),
    ("stormd_wait_seconds_sum", STORES, 0.002),
    ("stormd_wait_seconds_count", STORES, 1),
    (
        "stormd_wait_seconds_bucket",
        {**STORES, "le": "0.001"},
        0,
    ),
    ("stormd_rejections_total", {"reason": "quota"}, 5),
    ("stormd_sessions_ended_total", {"cause": "died"}, 1),
    ("stormd_sessions_opened_total", {}, 4),
    ("stormd_deaths_total", {}, 1),
    ("stormd_log_dropped_lines_total", {}, 4),
    ("stormd_cache_bytes", {}, 512),
    ("stormd_cache_used_bytes", {}, 256),
    ("stormd_cache_items", {}, 2),
    ("stormd_cache_evictions_total", {}, 6),
    ("stormd_cache_hits_total", {}, 0),
    ("stormd_spill_bytes", {}, 8192),
    ("stormd_spill_used_bytes", {}, 4096),
    ("stormd_spill_away_bytes", {}, 3000),
    ("stormd_spill_oldest_seconds", {}, 2.5),
    ("stormd_spill_ended", {}, 1),
    ("stormd_spill_lost_entries_total", {}, 3),
    ("stormd_spill_moved_bytes_total", {"direction": "read"}, 900),
    ("stormd_spill_busy_seconds_total", {"direction": "write"}, 0.5),
    ("stormd_worker_serving", WORKER, 1),
    ("stormd_worker_starts_total", WORKER, 2),
    ("stormd_worker_sessions", WORKER, 5),
    ("stormd_worker_processor_seconds", WORKER, 1.5),
]


def test_values(registry: CollectorRegistry) -> None:
    for name, labels, value in VALUES:
        assert registry.get_sample_value(name, labels) == value, name


def test_every_metric_has_samples_of_the_same_labels(registry: CollectorRegistry) -> None:
    found = list(registry.collect())
    assert len({metric.name for metric in found}) == len(found) > 40
    for metric in found:
        assert metric.samples, metric.name
        labels = {tuple(one for one in sample.labels if one != "le") for sample in metric.samples}
        assert len(labels) == 1, metric.name


def test_a_series_exists_before_its_first_event() -> None:
    # A counter that appears with its first event has no rate at that event.
    registry = CollectorRegistry()
    registry.register(collector(Counters()))
    for codec in CODECS:
        labels = {"direction": "restore", "codec": codec}
        assert registry.get_sample_value("stormd_operations_total", labels) == 0
    for name, label, values in [
        ("stormd_rejections_total", "reason", REJECTIONS),
        ("stormd_sessions_ended_total", "cause", ENDINGS),
        ("stormd_sessions", "device", DEVICES),
    ]:
        assert all(registry.get_sample_value(name, {label: value}) is not None for value in values)


def test_names_follow_the_conventions() -> None:
    for name, metric in families().items():
        assert re.fullmatch(r"stormd_[a-z_]+", name)
        assert metric.type in {"gauge", "counter", "histogram"}, name
        assert not metric.name.endswith("_total")
        assert metric.type != "histogram" or name.endswith("_seconds")
        assert metric.documentation.endswith("."), name


def test_the_route_speaks_both_formats() -> None:
    route = metrics_route(collector(Counters()))
    text = route("")
    assert text.content_type.startswith("text/plain")
    names = {metric.name for metric in parse_text(text.body.decode())}
    assert {"stormd_pool_bytes", "process_resident_memory_bytes"} <= names
    openmetrics = route("application/openmetrics-text; version=1.0.0")
    assert openmetrics.content_type.startswith("application/openmetrics-text")
    assert {metric.name for metric in parse_openmetrics(openmetrics.body.decode())} >= {
        "stormd_rejections"
    }


def test_health_names_who_is_stuck() -> None:
    stuck: list[str] = []
    route = health_route(lambda: stuck)
    assert (route("").status, route("").body) == (200, b"ok\n")
    stuck += ["cpu-0 is stuck", "cpu-1 has ended"]
    assert (route("").status, route("").body) == (503, b"cpu-0 is stuck\ncpu-1 has ended\n")
