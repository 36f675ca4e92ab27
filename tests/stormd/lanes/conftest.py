"""The cuda lane on fake devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import fake_cuda
from support.cuda_bench import LANE_MODULES, Bench, lanes_on_fake_devices


@pytest.fixture(params=[0.0, 0.005], ids=["prompt", "late"])
def lanes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[int]], Bench]]:
    """Open a lane on the fake devices of these ordinals, with a session on the first of them."""
    monkeypatch.setattr(fake_cuda, "lag_seconds", request.param)
    with fake_cuda.standing_in(monkeypatch, LANE_MODULES):
        yield from lanes_on_fake_devices()


@pytest.fixture
def bench(lanes: Callable[[list[int]], Bench]) -> Bench:
    return lanes([0])
