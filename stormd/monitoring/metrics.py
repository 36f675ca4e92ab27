"""The daemon's metrics for Prometheus.

Each metric is defined here once, with its type, labels, help and value. A scrape only reads one
status and the counters, on the loop that owns them. Names follow Prometheus' conventions: base
units, and _total for values that only grow. Labels take few values: no session or process ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

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
from stormd.monitoring.counters import CacheCounts, Counters
from stormd.protocol import DEVICES

__all__ = ["DaemonCollector", "health_route", "metrics_route"]

State = Mapping[str, Any]


class DaemonCollector(Collector):
    """Reads `status` (the object of `stormd status --json`), the counters and the stuck workers.

    All three are read anew at each scrape, in the thread that scrapes. prometheus-client's own
    process_* metrics are served beside them.
    """

    def __init__(
        self,
        *,
        status: Callable[[], State],
        counters: Callable[[], Counters],
        stuck: Callable[[], Sequence[str]],
    ) -> None:
        self._status = status
        self._counters = counters
        self._stuck = stuck

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, also those without a sample yet."""
        status, counters = self._status(), self._counters()
        yield from _pool(status)
        yield from _cache(status["cache"] or _NO_CACHE, counters.cache)
        yield from _spill(status["spill"] or _NO_SPILL)
        yield from _sessions(status["sessions"], counters)
        yield from _flows(counters)
        yield from _gpus(status["gpus"])
        yield from _workers(status["workers"])
        yield _gauge(
            "stormd_stuck_workers", "Workers that are stuck or have ended.", len(self._stuck())
        )
        yield from _troubles(status, counters)


def metrics_route(collector: Collector) -> Route:
    """Return the route /metrics: the collector's and the process's metrics, as Accept asks."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    def answer(accept: str) -> Reply:
        encoder, content_type = choose_encoder(accept)
        return Reply(encoder(registry), content_type)

    return answer


def health_route(stuck: Callable[[], Sequence[str]]) -> Route:
    """Return the route /healthz: 200 while no worker is stuck, else 503 and the stuck workers."""

    def answer(_accept: str) -> Reply:
        names = stuck()
        if names:
            body = "".join(f"{name}\n" for name in names).encode()
            return Reply(body, status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Reply(b"ok\n")

    return answer


# --- the metrics ----------------------------------------------------------------------------

_gauge: Final = GaugeMetricFamily
_counter: Final = CounterMetricFamily

_NO_CACHE: Final[State] = dict.fromkeys(("capacity_bytes", "used_bytes", "items"), 0)
_NO_SPILL: Final[State] = {
    **dict.fromkeys(("capacity_bytes", "used_bytes", "away_bytes", "oldest_seconds"), 0),
    **{way: {"bytes": 0, "busy_seconds": 0.0} for way in ("write", "read")},
    "lost_entries": 0,
    "ended": "",
}


def _each(kind: Any, name: str, values: State, helps: Mapping[str, str]) -> Iterator[Metric]:
    """Yield a metric without labels for each key of `helps`; the key completes the name."""
    for key, text in helps.items():
        yield kind(name.format(key), text, value=values[key])


def _with_samples(metric: Any, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Return the metric after adding a sample for each tuple of label values."""
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric  # type: ignore[no-any-return]  # add_metric differs between the kinds


def _pool(status: State) -> Iterator[Metric]:
    pool = status["pool"]
    build = _gauge("stormd_build_info", "Always 1; the labels say what runs.", labels=("version",))
    yield _with_samples(build, [((status["version"],), 1)])
    yield _gauge("stormd_pool_bytes", "Size of the pool.", pool["capacity_bytes"])
    helps = {
        "committed_bytes": "Memory taken for the pool so far.",
        "used_bytes": "Bytes of the pool that hold blobs.",
        "promised_bytes": "Bytes promised to entries that are being encoded, at their worst case.",
        "peak_used_bytes": "Most bytes used since the start.",
        "largest_free_bytes": "Largest contiguous free range.",
    }
    yield from _each(_gauge, "stormd_pool_{}", pool, helps)
    yield _gauge("stormd_entries", "Entries held.", status["entries"])
    text = "Bytes of the pool's entries before encoding."
    yield _gauge("stormd_entries_raw_bytes", text, status["raw_bytes"])


def _cache(cache: State, counts: CacheCounts) -> Iterator[Metric]:
    text = "Size of the shared cache; 0 where there is none."
    yield _gauge("stormd_cache_bytes", text, cache["capacity_bytes"])
    helps = {
        "used_bytes": "Bytes of the shared cache that hold blobs.",
        "items": "Named tensors in the shared cache.",
    }
    yield from _each(_gauge, "stormd_cache_{}", cache, helps)
    helps = {
        "puts": "Tensors put into the shared cache.",
        "hits": "Gets from the cache that found theirs.",
        "misses": "Gets from the cache that found nothing.",
        "evictions": "Cached tensors dropped to make room.",
        "expirations": "Cached tensors that outlived their time.",
    }
    yield from _each(_counter, "stormd_cache_{}_total", counts.as_status(), helps)


def _spill(spill: State) -> Iterator[Metric]:
    text = "Size of the tier on disk; 0 where there is none."
    yield _gauge("stormd_spill_bytes", text, spill["capacity_bytes"])
    helps = {
        "used_bytes": "Bytes of the tier on disk that are taken.",
        "away_bytes": "Bytes of blobs that are on disk and not in the pool.",
        "oldest_seconds": "Since what is on disk longest was written.",
    }
    yield from _each(_gauge, "stormd_spill_{}", spill, helps)
    text = "1 once a fault of the disk has ended the tier."
    yield _gauge("stormd_spill_ended", text, bool(spill["ended"]))
    text = "Entries that were on disk alone when the tier ended."
    yield _counter("stormd_spill_lost_entries_total", text, spill["lost_entries"])
    for name, text, key in (
        ("moved_bytes", "Bytes of blobs written to the disk and read back.", "bytes"),
        ("busy_seconds", "Time in which the disk was busy with them.", "busy_seconds"),
    ):
        moved = _counter(f"stormd_spill_{name}_total", text, labels=("direction",))
        yield _with_samples(moved, [((way,), spill[way][key]) for way in ("write", "read")])


def _sessions(sessions: Sequence[State], counters: Counters) -> Iterator[Metric]:
    by_device = Counter(session["device"] for session in sessions)
    by_user: Counter[int] = Counter()
    for session in sessions:
        by_user[session["uid"]] += session["used_bytes"]
    connected = _gauge("stormd_sessions", "Connected sessions.", labels=("device",))
    yield _with_samples(connected, [((device,), by_device[device]) for device in DEVICES])
    text = "Bytes that a user's sessions hold, also of what they are putting into the cache."
    held = _gauge("stormd_user_used_bytes", text, labels=("uid",))
    yield _with_samples(held, [((str(uid),), nbytes) for uid, nbytes in by_user.items()])
    yield _counter("stormd_sessions_opened_total", "Sessions granted.", counters.sessions)
    ended = _counter("stormd_sessions_ended_total", "Sessions ended, by cause.", labels=("cause",))
    yield _with_samples(ended, [((cause,), count) for cause, count in counters.ended.items()])
    text = "Sessions that ended neither in order nor with the daemon."
    yield _counter("stormd_deaths_total", text, counters.deaths)


def _flows(counters: Counters) -> Iterator[Metric]:
    labels = ("direction", "codec")
    flows = [
        ((direction, codec), flow)
        for direction, by_codec in (("store", counters.stores), ("restore", counters.restores))
        for codec, flow in by_codec.items()
    ]
    failures = "Stores and restores that came to nothing after they were admitted."
    for name, text, field in (
        ("operations", "Stores and restores that succeeded.", "operations"),
        ("raw_bytes", "Clients' bytes moved.", "raw_bytes"),
        ("stored_bytes", "Bytes of the blobs moved.", "blob_bytes"),
        ("work_seconds", "Time that workers spent on them, summed over workers.", "seconds"),
        ("failures", failures, "failures"),
    ):
        total = _counter(f"stormd_{name}_total", text, labels=labels)
        yield _with_samples(total, [(values, getattr(flow, field)) for values, flow in flows])
    text = "From the request for an operation until its answer."
    waits = HistogramMetricFamily("stormd_wait_seconds", text, labels=labels)
    for values, flow in flows:
        waits.add_metric(values, flow.waits.cumulative(), flow.waits.total_seconds)
    yield waits


def _gpus(gpus: Sequence[State]) -> Iterator[Metric]:
    links = [((gpu["device"], way), link) for gpu in gpus for way, link in gpu["link"].items()]
    for key, text in (
        ("bytes", "Bytes of blobs copied between a GPU and the pool."),
        ("busy_seconds", "Time that a GPU's link was busy with them, as the GPU measured it."),
    ):
        total = _counter(f"stormd_link_{key}_total", text, labels=("gpu", "direction"))
        yield _with_samples(total, [(values, link[key]) for values, link in links])
    known = [gpu for gpu in gpus if gpu["busy_percent"] is not None]
    text = "Share of the last look's period in which a kernel of anybody ran, where it is known."
    busy = _gauge("stormd_gpu_busy_ratio", text, labels=("gpu",))
    yield _with_samples(busy, [((gpu["device"],), gpu["busy_percent"] / 100) for gpu in known])


def _workers(workers: Sequence[State]) -> Iterator[Metric]:
    serving = "1 while a worker process serves; no samples where one process serves all devices."
    processor = "Processor time that a worker process has taken since it was started."
    named = [
        (
            (str(one["index"]), " ".join(one["devices"])),
            {**one, "serving": one["phase"] == "serving", "starts_total": one["starts"]},
        )
        for one in workers
    ]
    for kind, key, text in (
        (_gauge, "serving", serving),
        (_counter, "starts_total", "Times that a worker process was started."),
        (_gauge, "sessions", "Sessions of a worker."),
        (_gauge, "processor_seconds", processor),
    ):
        metric = kind(f"stormd_worker_{key}", text, labels=("worker", "devices"))
        yield _with_samples(metric, [(labels, one[key]) for labels, one in named])


def _troubles(status: State, counters: Counters) -> Iterator[Metric]:
    rejected = _counter("stormd_rejections_total", "Stores not admitted.", labels=("reason",))
    reasons = [((reason,), count) for reason, count in counters.rejected.items()]
    yield _with_samples(rejected, reasons)
    for name, text, count in (
        ("corrupt_blobs", "Blobs that failed their checksum.", counters.corrupt),
        ("malformed_frames", "Frames that were no valid message.", counters.malformed),
        ("unsent_frames", "Answers whose reader did not take them.", counters.unsent),
    ):
        yield _counter(f"stormd_{name}_total", text, count)
    text = "Requests answered by Refused, and lifelines whose token opens no session."
    yield _counter("stormd_refused_requests_total", text, counters.refused)
    text = "Lines of the daemon's own log that nobody took in time."
    yield _counter("stormd_log_dropped_lines_total", text, status["log"]["dropped_lines"])
