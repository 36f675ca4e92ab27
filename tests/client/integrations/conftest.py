"""What the tests of integrations share: frameworks are large."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def frameworks_are_not_collected() -> Iterator[None]:
    """Have collections pass over what a module imports: each would take a third of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
