"""The cuda lane on fake devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import fake_cuda
from support.cuda_bench import LAG_SECONDS, LANE_MODULES, Bench, lanes_on_fake_devices


@pytest.fixture
def lanes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[int]], Bench]]:
    """Open a lane on the fake devices of these ordinals, with a session on the first of them.

    They are late, unless a test is `prompt_and_late`.
    """
    monkeypatch.setattr(fake_cuda, "lag_seconds", getattr(request, "param", LAG_SECONDS))
    with fake_cuda.standing_in(monkeypatch, LANE_MODULES):
        yield from lanes_on_fake_devices()


@pytest.fixture
def bench(lanes: Callable[[list[int]], Bench]) -> Bench:
    return lanes([0])
