"""Random programs of views, in-place changes and operations that save: gradients are identical."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import storm_client as storm
from support.devices import DEVICES
from support.random_programs import run
from support.training import assert_identical

PROGRAMS = 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program(seed: int, device: str, client: storm.Client) -> None:
    offload = client.offload(min_bytes=1, codec="raw" if seed % 2 else "ancf")
    expected = run(seed, device, nullcontext)
    for _ in range(2):
        assert_identical(run(seed, device, lambda: offload), expected)
