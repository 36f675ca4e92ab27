"""Losses in tiles of few bytes, in a process that knows no loss yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from storm_client.losses import in_blocks, upcasts
from storm_client.losses.deferred import USE
from support.same_bits import set_tiles
from torch import Tensor


@pytest.fixture
def new_losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget which losses were compared, and which lines' copies are deferred."""
    set_tiles(monkeypatch, 4096)
    monkeypatch.setattr(in_blocks, "_PROVED", in_blocks._Proved())
    for name in ("_deferring", "_refused"):
        monkeypatch.setattr(upcasts, name, set())
    monkeypatch.setattr(USE, "differentiates_twice", False)
    _be_pytorchs()
    yield
    _be_pytorchs()


def _be_pytorchs() -> None:
    if "float" in Tensor.__dict__:
        del Tensor.float
