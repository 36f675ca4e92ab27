"""Records without a session: for tests that never store or load."""

from __future__ import annotations

from typing import Any

from storm_client.monitoring.stats import StatsRecorder
from storm_client.saved.ranges import StoredRange
from storm_client.saved.versions import SavedVersion
from torch import Tensor

__all__ = ["record_of", "version_of"]


def record_of(tensor: Tensor) -> StoredRange:
    """Return a record of the tensor's storage."""
    nobody: Any = None
    return StoredRange(nobody, tensor.untyped_storage(), tensor.dtype, StatsRecorder())


def version_of(tensor: Tensor) -> SavedVersion:
    """Return the tensor's version, as hooks note it."""
    return SavedVersion.of(tensor, tensor.untyped_storage()._cdata)
