"""Records without a session: for tests that never store or load."""

from __future__ import annotations

from typing import Any

from storm_client.records import StoredRange
from storm_client.stats import StatsRecorder
from storm_client.versions import SavedVersion
from torch import Tensor


def record_of(tensor: Tensor, span: tuple[int, int] | None = None) -> StoredRange:
    """Return a record of the bytes `span` of the tensor's storage, all of them by default."""
    storage = tensor.untyped_storage()
    nobody: Any = None
    return StoredRange(
        nobody,
        storage,
        span or (0, storage.nbytes()),
        SavedVersion.of(tensor),
        StatsRecorder(),
    )
