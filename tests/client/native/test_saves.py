"""Saves that compiled code decides about by itself: Python is asked nothing."""

from __future__ import annotations

from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client import hooks
from support.following import follow_by
from support.planning import replay_all
from support.training import seeded
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 48
STEPS = 24


def test_views_of_what_is_small_and_of_parameters_stay_without_python(
    device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As angles that are given to each layer, and weights of a model that nobody has named."""
    followed = follow_by("compiled", monkeypatch)
    replay_all(monkeypatch)
    weight = nn.Parameter(seeded(device, WIDTH, WIDTH))
    angles = seeded(device, WIDTH)
    x = seeded(device, 32, WIDTH)
    offload = client.offload(min_bytes=2048)
    handed_over: list[torch.Size] = []
    hand_over = hooks.StepHooks._pack_unexpected

    def noted(self: hooks.StepHooks, tensor: Tensor, position: int) -> Any:
        handed_over.append(tensor.shape)
        return hand_over(self, tensor, position)

    monkeypatch.setattr(hooks.StepHooks, "_pack_unexpected", noted)
    for _ in range(STEPS):
        handed_over.clear()
        with offload:
            y = functional.linear(x, weight).tanh() * angles.unsqueeze(0)
            loss = (y @ weight.t()).sin().square().sum()
        loss.backward()
    assert followed[-1]
    assert not {angles.unsqueeze(0).shape, weight.t().shape} & set(handed_over)
    assert offload.stats().skipped["parameter"] >= STEPS
    assert offload.stats().skipped["small"] >= STEPS
