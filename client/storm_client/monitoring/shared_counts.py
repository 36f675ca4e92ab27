"""Counts the outcome of one storage range that holds saved tensors of several layers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from storm_client.monitoring.stats import StatsRecorder

__all__ = ["RangeRecorder", "SharedRecorder"]


RangeRecorder: TypeAlias = "StatsRecorder | SharedRecorder"
"""A recorder of a range's outcome."""


@dataclass(slots=True)
class _Share:
    """One layer's share of the range, in bytes."""

    saved: int = 0
    """Of saved tensors that are the first in their storages."""
    duplicates: int = 0
    """Of the other saved tensors."""
    own: int = 0
    """Of the storages."""


class SharedRecorder:
    """Counts for each layer its storages' bytes of a range, without the gaps between storages."""

    def __init__(self) -> None:
        self._shares: defaultdict[StatsRecorder, _Share] = defaultdict(_Share)

    def add(self, recorder: StatsRecorder, nbytes: int, own: int) -> None:
        """Add a saved tensor of `nbytes`; `own` is the size of its storage if new, else 0."""
        share = self._shares[recorder]
        share.own += own
        if own:
            share.saved += nbytes
        else:
            share.duplicates += nbytes

    def saved(self, nbytes: int, seconds: float) -> None:  # noqa: ARG002
        """Count the tensors as saved; all of the time counts for the first layer."""
        for recorder, share in self._shares.items():
            recorder.saved(share.saved, seconds)
            if share.duplicates:
                recorder.deduplicated(share.duplicates)
            seconds = 0.0

    def kept_in_use(self, nbytes: int) -> None:  # noqa: ARG002 - as a StatsRecorder's
        """Count the storages as kept because something else references their memory."""
        for recorder, share in self._shares.items():
            recorder.kept_in_use(share.own)

    def undo_in_use(self, nbytes: int) -> None:  # noqa: ARG002
        """Undo `kept_in_use`."""
        for recorder, share in self._shares.items():
            recorder.undo_in_use(share.own)

    def offloaded(self, nbytes: int, dtype: torch.dtype, codec: str = "ancf") -> None:  # noqa: ARG002
        """Count the storages as accepted by the daemon."""
        for recorder, share in self._shares.items():
            recorder.offloaded(share.own, dtype, codec)

    def kept(self, nbytes: int, reason: str, detail: str = "") -> None:  # noqa: ARG002
        """Count the storages as kept because the daemon did not accept the range."""
        for recorder, share in self._shares.items():
            recorder.kept(share.own, reason, detail)

    def stored(self, nbytes: int, mode: str) -> None:
        """Divide a chunk's bytes in the pool in proportion to the storages' bytes."""
        own, total, counted = 0, sum(share.own for share in self._shares.values()), 0
        for recorder, share in self._shares.items():
            own += share.own
            until = nbytes * own // total
            recorder.stored(until - counted, mode)
            counted = until
