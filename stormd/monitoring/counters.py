"""The daemon's counters since its start: plain numbers, read by `status` and the metrics.

Counters only grow, and only the event loop writes them. Durations are counted in fixed buckets,
which never change while the daemon runs, so that two readings can be subtracted.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Final

from stormd.protocol import CODECS, REJECTIONS

__all__ = ["ENDINGS", "WAIT_BOUNDS", "CacheCounts", "Counters", "Flow", "Histogram"]

ENDINGS: Final = ("goodbye", "died", "unreachable", "unattached", "failed", "shutdown", "orphaned")
"""Why a session ended, in this order: its Goodbye; its lifeline's end; a client that takes no
answers; a client that never connected its lifeline; a bug of ours; the daemon's own end; a client
of an earlier daemon that did not resume. A client that is killed while answers are in flight to it
counts as `died` or `unreachable`, whichever is seen first."""


WAIT_BOUNDS: Final = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.05, 0.1, 0.25, 1.0, 5.0,
)  # fmt: skip
"""Upper bounds in seconds: a chunk of 8 MiB takes about 3 ms on the cpu lane, 1 ms on a GPU."""


@dataclass(slots=True)
class Histogram:
    """Counts of observations up to each of WAIT_BOUNDS, and their sum.

    The last of `counts` is the number of observations above every bound.
    """

    total_seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS) + 1))

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(WAIT_BOUNDS, seconds)] += 1
        self.total_seconds += seconds

    def add(self, other: Histogram) -> None:
        """Add the observations of another histogram."""
        self.counts = [sum(pair) for pair in zip(self.counts, other.counts, strict=True)]
        self.total_seconds += other.total_seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bound as text with the count of observations up to it, last bound "+Inf"."""
        names = [*(repr(bound) for bound in WAIT_BOUNDS), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


@dataclass(slots=True)
class Flow:
    """One direction of data in one codec.

    `raw_bytes` are the clients' bytes, `blob_bytes` the arena's. `seconds` is the work on them,
    summed over workers. `waits` has the times from a request to its answer.
    """

    operations: int = 0
    raw_bytes: int = 0
    blob_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    waits: Histogram = field(default_factory=Histogram)

    def add(self, raw_bytes: int, blob_bytes: int, seconds: float, waited: float) -> None:
        """Count one operation that succeeded."""
        self.operations += 1
        self.raw_bytes += raw_bytes
        self.blob_bytes += blob_bytes
        self.seconds += seconds
        self.waits.observe(waited)

    def merge(self, other: Flow) -> None:
        """Add the counts of another flow."""
        self.operations += other.operations
        self.raw_bytes += other.raw_bytes
        self.blob_bytes += other.blob_bytes
        self.seconds += other.seconds
        self.failures += other.failures
        self.waits.add(other.waits)


@dataclass(slots=True)
class CacheCounts:
    """Counts of the shared cache's tensors. `evictions` freed space, `expirations` were due."""

    puts: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    expirations: int = 0

    def as_status(self) -> dict[str, int]:
        """Return the counts as JSON values."""
        return asdict(self)


def _flows() -> dict[str, Flow]:
    return {codec: Flow() for codec in CODECS}


@dataclass(slots=True)
class Counters:
    """All counts of one daemon. `stores` and `restores` are by codec."""

    stores: dict[str, Flow] = field(default_factory=_flows)
    restores: dict[str, Flow] = field(default_factory=_flows)
    rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECTIONS, 0))
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDINGS, 0))
    sessions: int = 0
    corrupt: int = 0
    malformed: int = 0
    refused: int = 0
    unsent: int = 0
    cache: CacheCounts = field(default_factory=CacheCounts)

    def add_work(self, other: Counters) -> None:
        """Add the counts of a worker process, except those of sessions and the cache.

        The front grants the sessions, so it counts them, and it has the cache.
        """
        for ours, theirs in ((self.stores, other.stores), (self.restores, other.restores)):
            for codec, flow in theirs.items():
                ours[codec].merge(flow)
        for reason, count in other.rejected.items():
            self.rejected[reason] += count
        self.corrupt += other.corrupt
        self.malformed += other.malformed
        self.refused += other.refused
        self.unsent += other.unsent

    @classmethod
    def of(cls, numbers: dict[str, Any]) -> Counters:
        """Return the counters from the numbers that `asdict` made, perhaps in another process."""
        fields = dict(numbers)
        for way in ("stores", "restores"):
            fields[way] = {
                codec: Flow(**flow | {"waits": Histogram(**flow["waits"])})
                for codec, flow in numbers[way].items()
            }
        return cls(**fields | {"cache": CacheCounts(**numbers["cache"])})

    @property
    def deaths(self) -> int:
        """Sessions that ended neither in order nor with the daemon."""
        return sum(self.ended.values()) - self.ended["goodbye"] - self.ended["shutdown"]

    def as_status(self) -> dict[str, Any]:
        """Return the counts, without flows and the cache, as JSON values."""
        return {
            "rejected": dict(self.rejected),
            "ended": dict(self.ended),
            "sessions": self.sessions,
            "deaths": self.deaths,
            "corrupt": self.corrupt,
            "malformed": self.malformed,
            "refused": self.refused,
            "unsent": self.unsent,
        }

    def throughput(self) -> dict[str, Any]:
        """Return each direction's sums over the codecs, with bytes a second of work."""
        return {"store": _summed(self.stores), "restore": _summed(self.restores)}


def _summed(flows: dict[str, Flow]) -> dict[str, Any]:
    names = ("operations", "raw_bytes", "blob_bytes", "seconds", "failures")
    sums = {name: sum(getattr(flow, name) for flow in flows.values()) for name in names}
    rate = sums["raw_bytes"] / sums["seconds"] if sums["seconds"] else 0.0
    return {**sums, "bytes_per_second": rate}
