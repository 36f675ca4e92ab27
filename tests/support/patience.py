"""Clients that wait for a daemon which a busy machine gives no time to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from storm_client import offloading
from storm_client.transport import store

PATIENCE_SECONDS = 30.0


@contextmanager
def patient_clients() -> Iterator[None]:
    """Have this process's clients keep nothing, and tell nothing too early, for a late daemon."""
    with pytest.MonkeyPatch.context() as patch:  # a test's own patches still end first
        patch.setattr(store, "PATIENCE_SECONDS", PATIENCE_SECONDS)
        patch.setattr(offloading, "SETTLE_SECONDS", PATIENCE_SECONDS)
        yield
