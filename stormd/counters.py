"""What the daemon counts since its start: plain numbers, read by `status`.

What stays true: counters only grow, and only the event loop writes them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from stormd.protocol import REJECTIONS

__all__ = ["Counters", "Flow"]


@dataclass(slots=True)
class Flow:
    """One direction of data. `raw_bytes` are the clients' bytes, `blob_bytes` the arena's;
    `seconds` is the work on them, summed over workers.
    """

    operations: int = 0
    raw_bytes: int = 0
    blob_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0

    def add(self, raw_bytes: int, blob_bytes: int, seconds: float) -> None:
        """Count one operation that succeeded."""
        self.operations += 1
        self.raw_bytes += raw_bytes
        self.blob_bytes += blob_bytes
        self.seconds += seconds

    def as_status(self) -> dict[str, Any]:
        """Return the numbers, with bytes a second of work beside them."""
        rate = self.raw_bytes / self.seconds if self.seconds else 0.0
        return {**asdict(self), "bytes_per_second": rate}


@dataclass(slots=True)
class Counters:
    """`deaths` are sessions that ended without Goodbye, for whatever reason."""

    store: Flow = field(default_factory=Flow)
    restore: Flow = field(default_factory=Flow)
    rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECTIONS, 0))
    sessions: int = 0
    deaths: int = 0
    corrupt: int = 0
    malformed: int = 0
    refused: int = 0
    unsent: int = 0

    def as_status(self) -> dict[str, Any]:
        """Return the counts that are not a flow."""
        return {
            "rejected": dict(self.rejected),
            "sessions": self.sessions,
            "deaths": self.deaths,
            "corrupt": self.corrupt,
            "malformed": self.malformed,
            "refused": self.refused,
            "unsent": self.unsent,
        }
