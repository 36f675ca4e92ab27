"""Steps that no other is like are not learned, so that they cost no more than they have to."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import storm_client as storm
import torch
from storm_client.eager import controller
from storm_client.eager.recurrence import Recurrence
from torch import nn


def seen(*steps: bool) -> bool:
    """Return whether it is worth learning, after steps of which some were new."""
    found = Recurrence()
    for is_new in steps:
        found.saw(is_new=is_new)
    return found.is_seen


def test_a_few_new_steps_are_learned() -> None:
    assert seen()
    assert seen(True, True, True)
    assert not seen(True, True, True, True)


def test_a_fifth_of_all_may_be_new_without_end() -> None:
    assert seen(*[True, False, False, False, False] * 100)
    assert not seen(*[True, False] * 100)


def test_steps_that_are_like_others_make_up_for_any_number_that_were_not() -> None:
    assert seen(*[True] * 1000, *[False] * 8)
    assert not seen(*[True] * 1000, *[False] * 7)
    assert seen(*[True] * 1000, *[False] * 8, True, True, True), "what is watched again is new"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many events had the kinds that were planned, as they are."""
    found: list[int] = []
    make = controller.Planning._make

    def noting(planning: controller.Planning, kind: controller.Kind) -> None:
        found.append(len(kind.events))
        make(planning, kind)

    monkeypatch.setattr(controller.Planning, "_make", noting)
    return found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64))


def trained(net: nn.Module, context: object, depths: list[int]) -> list[torch.Tensor]:
    found, x = [], torch.linspace(-1, 1, 64 * 256).view(256, 64)
    for depth in depths:
        net.zero_grad()
        with context:  # type: ignore[attr-defined]
            y = net(x)
            for _ in range(depth):
                y = y.sin() * y
            loss = y.square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]
    return found


NEW = list(range(3, 23))


def test_steps_that_do_ever_new_things_are_neither_watched_nor_planned(
    client: storm.Client, planned: list[int]
) -> None:
    net = network()
    offload = client.offload(net, min_bytes=4096)
    assert all(map(torch.equal, trained(network(), nullcontext(), NEW), trained(net, offload, NEW)))
    assert len(planned) <= 6
    kind = offload._planning._kinds.latest
    assert kind is not None
    assert not kind.has_functions


def test_when_steps_come_again_they_are_learned_after_all(client: storm.Client) -> None:
    net = network()
    offload = client.offload(net, min_bytes=4096)
    depths = [*NEW, *[2] * 16]
    plain = trained(network(), nullcontext(), depths)
    assert all(map(torch.equal, plain, trained(net, offload, depths)))
    kind = offload._planning._kinds.latest
    assert kind is not None
    assert kind.has_functions
    plan = offload.plan
    assert plan is not None
    assert plan.bytes_by_decision["replay"] > 0


def test_blocks_that_save_nothing_are_no_new_steps(client: storm.Client) -> None:
    net = network()
    offload = client.offload(net, min_bytes=4096)
    for _ in range(10):
        with offload, torch.no_grad():
            net(torch.ones(256, 64))
    assert offload._planning._recurrence.is_seen
    trained(net, offload, [2] * 3)
    assert offload.plan is not None
