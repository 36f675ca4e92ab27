"""Many steps leave memory flat on both sides; `bench.steps` asserts what must hold."""

from __future__ import annotations

import pytest
from bench.steps import run
from support.devices import DEVICES

STEPS = 400


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_flat_over_many_steps(device: str) -> None:
    figures = run(STEPS, device)
    assert figures["steps"] == STEPS
    assert figures["offloaded_bytes"] > STEPS << 16
