"""Forwards that run inside a context, and layers that are the only ones whose activations leave."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext

import pytest
import storm_client as storm
import torch
from storm_client.integrations.forwards import enter_in_forward, offload_only
from support.training import assert_identical, gradients, seeded
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()
        for layer in self.layers:
            x = layer(x).sigmoid()
        return x.square().mean()


def trained(net: nn.Module, offload: storm.Offload | None) -> list[Tensor]:
    with nullcontext() if offload is None else offload:
        loss = net(seeded("cpu", 64, 32))
    loss.backward()
    return [loss.detach(), *gradients(net)]


def test_only_the_layers_activations_leave(client: storm.Client) -> None:
    plain, net = Net(), Net()
    expected = trained(plain, None)
    offload = client.offload(net, min_bytes=1)
    offload_only(offload, net.layers)
    offload_only(offload, net.layers[:2])  # in the place of the first choice
    assert_identical(trained(net, offload), expected)
    stats = offload.stats()
    size = 64 * 32 * 4
    outputs, tanh, sigmoid = 2, 2, 1  # of two layers: each saves its input, which is one's sigmoid
    assert stats.offloaded_bytes == (outputs + tanh) * size
    assert stats.skipped["outside"] > sigmoid
    assert not stats.kept


def test_nobody_is_inside_after_a_forward_that_was_interrupted(client: storm.Client) -> None:
    net = Net()
    offload = client.offload(net, min_bytes=1)
    offload_only(offload, net.layers)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with net.layers[1][1].register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
        trained(net, offload)
    before = offload.stats().offloaded_bytes
    with offload:
        seeded("cpu", 64, 32, grad=True).exp().sum().backward()
    assert offload.stats().offloaded_bytes == before


@pytest.mark.parametrize(
    ("layers", "text"),
    [([], "got no module"), ([nn.Linear(2, 2), "layers.0"], "an object of type str")],
)
def test_what_are_no_layers_is_refused(
    layers: list[object], text: str, client: storm.Client
) -> None:
    offload = client.offload()
    with pytest.raises(storm.UsageError, match=text):
        offload_only(offload, layers)  # type: ignore[arg-type]
    assert not any("forward" in vars(one) for one in layers if isinstance(one, nn.Module))


def test_the_block_of_a_forward(client: storm.Client) -> None:
    plain, net = Net(), Net()
    expected = trained(plain, None)
    offload = client.offload(net, min_bytes=1)
    for _ in range(2):  # the second replaces the first, and does not enter both
        enter_in_forward(net, offload)
    assert_identical(trained(net, None), expected)
    assert offload.stats().offloaded_bytes > 0
    assert inspect.signature(net.forward) == inspect.signature(plain.forward)


def test_a_copied_model_runs_its_own_layers(client: storm.Client) -> None:
    net = Net()
    enter_in_forward(net, client.offload(net, min_bytes=1))
    copied = copy.deepcopy(net)
    with torch.no_grad():
        copied.layers[0][0].weight.zero_()
    first, second = (one(seeded("cpu", 4, 32)) for one in (net, copied))
    assert first != second
