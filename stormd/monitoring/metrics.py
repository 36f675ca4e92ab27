"""The daemon's figures for Prometheus.

Every family that is ever exposed stands in FAMILIES with its type, labels and help, and a scrape
only reads: it is made of one status and the counters, on the loop that owns them. Names follow
Prometheus' conventions: base units, _total for what only grows. Labels take few values: no session
or process ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from stormd.endpoint import Reply, Route
from stormd.monitoring.counters import Counters, Flow
from stormd.protocol import DEVICES

__all__ = ["FAMILIES", "DaemonCollector", "Family", "health_route", "metrics_route"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as it is exposed; counters' names carry their _total."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


_FLOW_LABELS: Final = ("direction", "codec")
_LINK_LABELS: Final = ("gpu", "direction")
_WORKER_LABELS: Final = ("worker", "devices")

FAMILIES: Final = {
    family.name: family
    for family in (
        Family("stormd_build_info", "gauge", "Always 1; the labels say what runs.", ("version",)),
        Family("stormd_pool_bytes", "gauge", "Size of the pool."),
        Family("stormd_pool_committed_bytes", "gauge", "Memory taken for the pool so far."),
        Family("stormd_pool_used_bytes", "gauge", "Bytes of the pool that hold blobs."),
        Family(
            "stormd_pool_promised_bytes",
            "gauge",
            "Bytes promised to entries that are being encoded, at their worst case.",
        ),
        Family("stormd_pool_peak_used_bytes", "gauge", "Most bytes used since the start."),
        Family("stormd_pool_largest_free_bytes", "gauge", "Largest contiguous free range."),
        Family("stormd_entries", "gauge", "Entries held."),
        Family("stormd_entries_raw_bytes", "gauge", "Bytes of the pool's entries before encoding."),
        Family("stormd_cache_bytes", "gauge", "Size of the shared cache; 0 where there is none."),
        Family("stormd_cache_used_bytes", "gauge", "Bytes of the shared cache that hold blobs."),
        Family("stormd_cache_items", "gauge", "Named tensors in the shared cache."),
        Family("stormd_spill_bytes", "gauge", "Size of the tier on disk; 0 where there is none."),
        Family("stormd_spill_used_bytes", "gauge", "Bytes of the tier on disk that are taken."),
        Family(
            "stormd_spill_away_bytes",
            "gauge",
            "Bytes of blobs that are on disk and not in the pool.",
        ),
        Family(
            "stormd_spill_oldest_seconds", "gauge", "Since what is on disk longest was written."
        ),
        Family("stormd_spill_ended", "gauge", "1 once a fault of the disk has ended the tier."),
        Family(
            "stormd_spill_moved_bytes_total",
            "counter",
            "Bytes of blobs written to the disk and read back.",
            ("direction",),
        ),
        Family(
            "stormd_spill_busy_seconds_total",
            "counter",
            "Time in which the disk was busy with them.",
            ("direction",),
        ),
        Family(
            "stormd_spill_lost_entries_total",
            "counter",
            "Entries that were on disk alone when the tier ended.",
        ),
        Family("stormd_sessions", "gauge", "Connected sessions.", ("device",)),
        Family(
            "stormd_user_used_bytes",
            "gauge",
            "Bytes that a user's sessions hold, also of what they are putting into the cache.",
            ("uid",),
        ),
        Family("stormd_stuck_workers", "gauge", "Workers that are stuck or have ended."),
        Family(
            "stormd_operations_total",
            "counter",
            "Stores and restores that succeeded.",
            _FLOW_LABELS,
        ),
        Family("stormd_raw_bytes_total", "counter", "Clients' bytes moved.", _FLOW_LABELS),
        Family("stormd_stored_bytes_total", "counter", "Bytes of the blobs moved.", _FLOW_LABELS),
        Family(
            "stormd_work_seconds_total",
            "counter",
            "Time that workers spent on them, summed over workers.",
            _FLOW_LABELS,
        ),
        Family(
            "stormd_failures_total",
            "counter",
            "Stores and restores that came to nothing after they were admitted.",
            _FLOW_LABELS,
        ),
        Family(
            "stormd_wait_seconds",
            "histogram",
            "From the request for an operation until its answer.",
            _FLOW_LABELS,
        ),
        Family(
            "stormd_link_bytes_total",
            "counter",
            "Bytes of blobs copied between a GPU and the pool.",
            _LINK_LABELS,
        ),
        Family(
            "stormd_link_busy_seconds_total",
            "counter",
            "Time that a GPU's link was busy with them, as the GPU measured it.",
            _LINK_LABELS,
        ),
        Family(
            "stormd_gpu_busy_ratio",
            "gauge",
            "Share of the last look's period in which a kernel of anybody ran, where it is known.",
            ("gpu",),
        ),
        Family(
            "stormd_worker_serving",
            "gauge",
            "1 while a worker process serves; no samples where one process serves all devices.",
            _WORKER_LABELS,
        ),
        Family(
            "stormd_worker_starts_total",
            "counter",
            "Times that a worker process was started.",
            _WORKER_LABELS,
        ),
        Family("stormd_worker_sessions", "gauge", "Sessions of a worker.", _WORKER_LABELS),
        Family(
            "stormd_worker_processor_seconds",
            "gauge",
            "Processor time that a worker process has taken since it was started.",
            _WORKER_LABELS,
        ),
        Family("stormd_rejections_total", "counter", "Stores not admitted.", ("reason",)),
        Family("stormd_sessions_opened_total", "counter", "Sessions granted."),
        Family("stormd_sessions_ended_total", "counter", "Sessions ended, by cause.", ("cause",)),
        Family(
            "stormd_deaths_total",
            "counter",
            "Sessions that ended neither in order nor with the daemon.",
        ),
        Family("stormd_corrupt_blobs_total", "counter", "Blobs that failed their checksum."),
        Family("stormd_cache_puts_total", "counter", "Tensors put into the shared cache."),
        Family("stormd_cache_hits_total", "counter", "Gets from the cache that found theirs."),
        Family("stormd_cache_misses_total", "counter", "Gets from the cache that found nothing."),
        Family("stormd_cache_evictions_total", "counter", "Cached tensors dropped to make room."),
        Family(
            "stormd_cache_expirations_total", "counter", "Cached tensors that outlived their time."
        ),
        Family("stormd_malformed_frames_total", "counter", "Frames that were no valid message."),
        Family(
            "stormd_refused_requests_total",
            "counter",
            "Requests answered by Refused, and lifelines whose token opens no session.",
        ),
        Family("stormd_unsent_frames_total", "counter", "Answers whose reader did not take them."),
        Family(
            "stormd_log_dropped_lines_total",
            "counter",
            "Lines of the daemon's own log that nobody took in time.",
        ),
    )
}
"""Every metric by name. prometheus-client's own process_* metrics come beside them."""

Values = Iterator[tuple[str, tuple[str, ...], float]]
"""Name of a family, its labels' values, the sample's value."""


class DaemonCollector(Collector):
    """Reads `status` (the object of `stormd status --json`), the counters and the stuck workers.

    All three are read anew at each scrape, in the thread that scrapes.
    """

    def __init__(
        self,
        *,
        status: Callable[[], Mapping[str, Any]],
        counters: Callable[[], Counters],
        stuck: Callable[[], Sequence[str]],
    ) -> None:
        self._status = status
        self._counters = counters
        self._stuck = stuck

    def collect(self) -> Iterator[Metric]:
        """Yield every family of FAMILIES, in their order."""
        metrics = {family.name: _metric(family) for family in FAMILIES.values()}
        counters = self._counters()
        for name, labels, value in self._values(counters):
            metrics[name].add_metric(labels, value)
        for labels, flow in _flows(counters):
            metrics["stormd_wait_seconds"].add_metric(
                labels, flow.waits.cumulative(), flow.waits.total_seconds
            )
        yield from metrics.values()

    def _values(self, counters: Counters) -> Values:
        status = self._status()
        yield from _gauges(status)
        yield from _gpus(status["gpus"])
        yield "stormd_stuck_workers", (), len(self._stuck())
        yield from _workers(status["workers"])
        yield from _flow_values(counters)
        yield from _counts(counters)


def metrics_route(collector: Collector) -> Route:
    """Return the route /metrics: the collector's and the process's metrics, as asked for."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    def answer(accept: str) -> Reply:
        encoder, content_type = choose_encoder(accept)
        return Reply(encoder(registry), content_type)

    return answer


def health_route(stuck: Callable[[], Sequence[str]]) -> Route:
    """Return the route /healthz: 200 while every worker gets on, else 503 and who does not."""

    def answer(_accept: str) -> Reply:
        names = stuck()
        if names:
            body = "".join(f"{name}\n" for name in names).encode()
            return Reply(body, status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Reply(b"ok\n")

    return answer


# --- families and their values --------------------------------------------------------------

_KINDS: Final[dict[str, Any]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


_NO_SPILL: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("capacity_bytes", "used_bytes", "away_bytes", "oldest_seconds"), 0),
    **{way: {"bytes": 0, "busy_seconds": 0.0} for way in ("write", "read")},
    "lost_entries": 0,
    "ended": "",
}


def _metric(family: Family) -> Any:
    """Return an empty family; Any, for add_metric differs between the kinds."""
    return _KINDS[family.kind](family.name, family.help, labels=family.labels)


def _gauges(status: Mapping[str, Any]) -> Values:
    pool, sessions = status["pool"], status["sessions"]
    yield "stormd_build_info", (status["version"],), 1
    yield "stormd_pool_bytes", (), pool["capacity_bytes"]
    yield "stormd_pool_committed_bytes", (), pool["committed_bytes"]
    yield "stormd_pool_used_bytes", (), pool["used_bytes"]
    yield "stormd_pool_promised_bytes", (), pool["promised_bytes"]
    yield "stormd_pool_peak_used_bytes", (), pool["peak_used_bytes"]
    yield "stormd_pool_largest_free_bytes", (), pool["largest_free_bytes"]
    yield "stormd_entries", (), status["entries"]
    yield "stormd_entries_raw_bytes", (), status["raw_bytes"]
    yield "stormd_log_dropped_lines_total", (), status["log"]["dropped_lines"]
    cache = status["cache"] or {}
    yield "stormd_cache_bytes", (), cache.get("capacity_bytes", 0)
    yield "stormd_cache_used_bytes", (), cache.get("used_bytes", 0)
    yield "stormd_cache_items", (), cache.get("items", 0)
    yield from _spill(status["spill"])
    by_device = Counter(session["device"] for session in sessions)
    for device in DEVICES:
        yield "stormd_sessions", (device,), by_device[device]
    by_user: Counter[int] = Counter()
    for session in sessions:
        by_user[session["uid"]] += session["used_bytes"]
    for uid, used_bytes in by_user.items():
        yield "stormd_user_used_bytes", (str(uid),), used_bytes


def _spill(spill: Mapping[str, Any] | None) -> Values:
    spill = spill or _NO_SPILL
    yield "stormd_spill_bytes", (), spill["capacity_bytes"]
    yield "stormd_spill_used_bytes", (), spill["used_bytes"]
    yield "stormd_spill_away_bytes", (), spill["away_bytes"]
    yield "stormd_spill_oldest_seconds", (), spill["oldest_seconds"]
    yield "stormd_spill_ended", (), bool(spill["ended"])
    yield "stormd_spill_lost_entries_total", (), spill["lost_entries"]
    for direction in ("write", "read"):
        moved = spill[direction]
        yield "stormd_spill_moved_bytes_total", (direction,), moved["bytes"]
        yield "stormd_spill_busy_seconds_total", (direction,), moved["busy_seconds"]


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Values:
    for gpu in gpus:
        for direction, link in gpu["link"].items():
            yield "stormd_link_bytes_total", (gpu["device"], direction), link["bytes"]
            yield "stormd_link_busy_seconds_total", (gpu["device"], direction), link["busy_seconds"]
        if gpu["busy_percent"] is not None:
            yield "stormd_gpu_busy_ratio", (gpu["device"],), gpu["busy_percent"] / 100


def _workers(workers: Sequence[Mapping[str, Any]]) -> Values:
    for worker in workers:
        labels = (str(worker["index"]), " ".join(worker["devices"]))
        yield "stormd_worker_serving", labels, worker["phase"] == "serving"
        yield "stormd_worker_starts_total", labels, worker["starts"]
        yield "stormd_worker_sessions", labels, worker["sessions"]
        yield "stormd_worker_processor_seconds", labels, worker["processor_seconds"]


def _flows(counters: Counters) -> Iterator[tuple[tuple[str, str], Flow]]:
    """Yield (direction, codec) and the flow of each."""
    for direction, flows in (("store", counters.stores), ("restore", counters.restores)):
        for codec, flow in flows.items():
            yield (direction, codec), flow


def _flow_values(counters: Counters) -> Values:
    for labels, flow in _flows(counters):
        yield "stormd_operations_total", labels, flow.operations
        yield "stormd_raw_bytes_total", labels, flow.raw_bytes
        yield "stormd_stored_bytes_total", labels, flow.blob_bytes
        yield "stormd_work_seconds_total", labels, flow.seconds
        yield "stormd_failures_total", labels, flow.failures


def _counts(counters: Counters) -> Values:
    for reason, count in counters.rejected.items():
        yield "stormd_rejections_total", (reason,), count
    for cause, count in counters.ended.items():
        yield "stormd_sessions_ended_total", (cause,), count
    yield "stormd_sessions_opened_total", (), counters.sessions
    yield "stormd_deaths_total", (), counters.deaths
    yield "stormd_corrupt_blobs_total", (), counters.corrupt
    for event, count in counters.cache.as_status().items():
        yield f"stormd_cache_{event}_total", (), count
    yield "stormd_malformed_frames_total", (), counters.malformed
    yield "stormd_refused_requests_total", (), counters.refused
    yield "stormd_unsent_frames_total", (), counters.unsent
