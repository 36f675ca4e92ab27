"""Counts what becomes of one range that holds what several layers have saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from storm_client.monitoring.stats import StatsRecorder

__all__ = ["RangeRecorder", "SharedRecorder"]


RangeRecorder: TypeAlias = "StatsRecorder | SharedRecorder"
"""What a range is counted by."""


class _Share:
    """Of one layer, in bytes."""

    __slots__ = ("duplicates", "own", "saved")

    def __init__(self) -> None:
        self.saved = 0
        """Of saved tensors, each the first in its storage."""
        self.duplicates = 0
        """Of the others."""
        self.own = 0
        """Of the storages."""


class SharedRecorder:
    """Counts for each layer what its storages take of a range, without what lies between them."""

    def __init__(self) -> None:
        """Start with nobody's."""
        self._shares: dict[StatsRecorder, _Share] = {}

    def add(self, recorder: StatsRecorder, nbytes: int, own: int) -> None:
        """Add a saved tensor of `nbytes`, and the storage of `own` bytes that it brings, if any."""
        share = self._shares.get(recorder)
        if share is None:
            share = self._shares[recorder] = _Share()
        share.own += own
        if own:
            share.saved += nbytes
        else:
            share.duplicates += nbytes

    def saved(self, nbytes: int, seconds: float) -> None:  # noqa: ARG002
        """Count the tensors as saved, and the time that this took as the first layer's."""
        for recorder, share in self._shares.items():
            recorder.saved(share.saved, seconds)
            if share.duplicates:
                recorder.deduplicated(share.duplicates)
            seconds = 0.0

    def stays_in_use(self, nbytes: int) -> None:  # noqa: ARG002 - as a StatsRecorder's
        """Count the storages as kept because somebody else holds their memory."""
        for recorder, share in self._shares.items():
            recorder.stays_in_use(share.own)

    def leaves(self, nbytes: int) -> None:  # noqa: ARG002
        """Take that back."""
        for recorder, share in self._shares.items():
            recorder.leaves(share.own)

    def offloaded(self, nbytes: int, dtype: torch.dtype, codec: str = "ancf") -> None:  # noqa: ARG002
        """Count the storages as accepted by the daemon."""
        for recorder, share in self._shares.items():
            recorder.offloaded(share.own, dtype, codec)

    def kept(self, nbytes: int, reason: str, detail: str = "") -> None:  # noqa: ARG002
        """Count the storages as kept, because the daemon did not take the range."""
        for recorder, share in self._shares.items():
            recorder.kept(share.own, reason, detail)

    def stored(self, nbytes: int, mode: str) -> None:
        """Divide what a chunk takes in the pool by the storages' bytes."""
        own, total, counted = 0, sum(share.own for share in self._shares.values()), 0
        for recorder, share in self._shares.items():
            own += share.own
            until = nbytes * own // total
            recorder.stored(until - counted, mode)
            counted = until
