"""What the tests of integrations share: frameworks are large."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from support import frameworks


@pytest.fixture(autouse=True, scope="module")
def frameworks_are_not_collected() -> Iterator[None]:
    """Have collections pass over what a module imports: each would take a third of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def on_each_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test once a device, with the framework training there."""
    monkeypatch.setattr(frameworks, "name", device)
