"""What the tests of integrations share: the device that a framework trains on."""

from __future__ import annotations

import pytest
from support import frameworks


@pytest.fixture
def on_each_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test once a device, with the framework training there."""
    monkeypatch.setattr(frameworks, "name", device)
