"""What the tests of integrations share: the device that a framework trains on."""

from __future__ import annotations

import pytest
import torch
from support import frameworks


@pytest.fixture
def on_each_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test once a device, with the framework training there.

    A framework sees one GPU at most: transformers' Trainer would spread a model over several.
    """
    monkeypatch.setattr(frameworks, "name", device)
    count = min(1, torch.cuda.device_count())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
