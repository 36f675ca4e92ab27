"""What an Offload did, counted.

What stays true: every byte that autograd handed over is counted once as saved and, by the time
the step's stores are settled, in exactly one of skipped, deduplicated, offloaded and kept. Saved,
skipped and deduplicated bytes are those of tensors; offloaded, stored and kept bytes are those of
the storage ranges behind them, so they differ where a tensor is a view of a larger storage.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from storm_client.dtypes import dtype_name

__all__ = ["OffloadStats", "StatsRecorder"]


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Totals of one Offload since it was made. Sizes in bytes, times in seconds."""

    saved_bytes: int
    """What autograd handed over."""
    skipped_bytes: int
    """Passed over by the policy: parameters, small tensors, kinds that cannot be stored, and what
    somebody else still holds in memory, and could change ("in_use")."""
    deduplicated_bytes: int
    """In a range that was stored already."""
    offloaded_bytes: int
    """Given to the daemon, before encoding."""
    stored_bytes: int
    """What that takes in the daemon's arena."""
    kept_bytes: int
    """Meant for the daemon but left with the client."""
    skipped: Mapping[str, int]
    """Tensors passed over, by reason."""
    kept: Mapping[str, int]
    """Ranges left with the client, by reason."""
    store_seconds: float
    """Spent by training threads on handing tensors over."""
    restore_wait_seconds: float
    """Spent by training threads on getting back what had left their memory."""
    offloaded_by_dtype: Mapping[str, int]
    """Offloaded bytes by the dtype of the tensor that was saved first."""
    stored_by_mode: Mapping[str, int]
    """Bytes in the arena by the codec's mode."""

    @property
    def ratio(self) -> float:
        """Offloaded over stored bytes, 1.0 where nothing has been stored."""
        return self.offloaded_bytes / self.stored_bytes if self.stored_bytes else 1.0


class StatsRecorder:
    """Counts for one Offload, from any thread."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()  # protects all counters below
        self._bytes: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._dtypes: Counter[str] = Counter()
        self._modes: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"store": 0.0, "restore": 0.0}

    def skipped(self, nbytes: int, reason: str) -> None:
        """Count a saved tensor that the policy passed over."""
        with self._lock:
            self._bytes["saved"] += nbytes
            self._bytes["skipped"] += nbytes
            self._skipped[reason] += 1

    def stays_in_use(self, nbytes: int) -> None:
        """Count a range, counted as saved, that stays because somebody else holds its memory."""
        with self._lock:
            self._bytes["skipped"] += nbytes
            self._skipped["in_use"] += 1

    def leaves(self, nbytes: int) -> None:
        """Take `stays_in_use` back: nobody else holds it any more."""
        with self._lock:
            self._bytes["skipped"] -= nbytes
            self._skipped["in_use"] -= 1

    def deduplicated(self, nbytes: int) -> None:
        """Count a saved tensor whose bytes were stored already."""
        with self._lock:
            self._bytes["saved"] += nbytes
            self._bytes["deduplicated"] += nbytes

    def saved(self, nbytes: int, seconds: float) -> None:
        """Count a saved tensor that makes a new record, and the time that it took to make."""
        with self._lock:
            self._bytes["saved"] += nbytes
            self._seconds["store"] += seconds

    def restored(self, seconds: float) -> None:
        """Count the time that a thread spent on getting a tensor back."""
        with self._lock:
            self._seconds["restore"] += seconds

    def offloaded(self, nbytes: int, dtype: torch.dtype) -> None:
        """Count a range that the daemon has accepted."""
        with self._lock:
            self._bytes["offloaded"] += nbytes
            self._dtypes[dtype_name(dtype)] += nbytes

    def stored(self, nbytes: int, mode: str) -> None:
        """Count a part that arrived in the arena with `nbytes`."""
        with self._lock:
            self._bytes["stored"] += nbytes
            self._modes[mode] += nbytes

    def kept(self, nbytes: int, reason: str) -> None:
        """Count a range that stays with the client."""
        with self._lock:
            self._bytes["kept"] += nbytes
            self._kept[reason] += 1

    def snapshot(self) -> OffloadStats:
        """Return the present totals."""
        with self._lock:
            return OffloadStats(
                saved_bytes=self._bytes["saved"],
                skipped_bytes=self._bytes["skipped"],
                deduplicated_bytes=self._bytes["deduplicated"],
                offloaded_bytes=self._bytes["offloaded"],
                stored_bytes=self._bytes["stored"],
                kept_bytes=self._bytes["kept"],
                skipped=_frozen(self._skipped),
                kept=_frozen(self._kept),
                store_seconds=self._seconds["store"],
                restore_wait_seconds=self._seconds["restore"],
                offloaded_by_dtype=_frozen(self._dtypes),
                stored_by_mode=_frozen(self._modes),
            )


def _frozen(counter: Counter[str]) -> Mapping[str, int]:
    return MappingProxyType({reason: count for reason, count in counter.items() if count})
