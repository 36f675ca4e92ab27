"""What a scrape of a daemon that has everything shows: a state, and the metrics made of it."""

from __future__ import annotations

from typing import Any

from prometheus_client.core import Metric

from stormd.monitoring.counters import Counters
from stormd.monitoring.metrics import DaemonCollector

__all__ = ["STATUS", "collector", "exposed_name", "families"]

STATUS: dict[str, Any] = {
    "version": "1.2.3",
    "pool": {
        "capacity_bytes": 4096,
        "committed_bytes": 2048,
        "used_bytes": 1000,
        "promised_bytes": 200,
        "peak_used_bytes": 1500,
        "largest_free_bytes": 2048,
    },
    "cache": {"capacity_bytes": 512, "used_bytes": 256, "items": 2},
    "spill": {
        "capacity_bytes": 8192,
        "used_bytes": 4096,
        "away_bytes": 3000,
        "oldest_seconds": 2.5,
        "write": {"bytes": 5000, "busy_seconds": 0.5},
        "read": {"bytes": 900, "busy_seconds": 0.125},
        "lost_entries": 3,
        "ended": "a write failed",
    },
    "entries": 3,
    "raw_bytes": 1440,
    "log": {"dropped_lines": 4},
    "workers": [
        {
            "index": 1,
            "devices": ["cuda:1", "cuda:3"],
            "phase": "serving",
            "starts": 2,
            "sessions": 5,
            "processor_seconds": 1.5,
        }
    ],
    "gpus": [
        {
            "device": "cuda:0",
            "busy_percent": 40,
            "link": {
                "store": {"bytes": 700, "busy_seconds": 1.5},
                "restore": {"bytes": 0, "busy_seconds": 0.0},
            },
        },
        {"device": "cuda:1", "busy_percent": None, "link": {}},
    ],
    "sessions": [
        {"id": 11, "uid": 7, "device": "cpu", "used_bytes": 400},
        {"id": 12, "uid": 7, "device": "cuda", "used_bytes": 500},
        {"id": 13, "uid": 8, "device": "cpu", "used_bytes": 100},
    ],
}


def collector(counters: Counters, stuck: tuple[str, ...] = ()) -> DaemonCollector:
    return DaemonCollector(status=lambda: STATUS, counters=lambda: counters, stuck=lambda: stuck)


def exposed_name(metric: Metric) -> str:
    return metric.name + ("_total" if metric.type == "counter" else "")


def families() -> dict[str, Metric]:
    """Return every metric by its name, each with a sample."""
    return {exposed_name(one): one for one in collector(Counters()).collect()}
