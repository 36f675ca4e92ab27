"""Ternary layers through a real daemon: trained with offload."""

from __future__ import annotations

import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_kernels.ternary.nn import TernaryLinear
from torch import nn

WIDTH = 512


def test_stored_activations_of_ternary_layers_take_two_bits(daemon: ChildDaemon) -> None:
    rows, layers = 2048, 4
    torch.manual_seed(0)
    net = nn.Sequential(
        *(TernaryLinear(WIDTH, WIDTH, bias=False, activations="ternary") for _ in range(layers))
    )
    x = torch.randn(rows, WIDTH, requires_grad=True)
    net(x).sum().backward()
    expected = [layer.weight.grad.clone() for layer in net]
    net.zero_grad()
    with storm.connect(daemon.address, embedded="never") as client:
        offload = client.offload(net, min_bytes=1024)
        with offload:
            loss = net(x).sum()
        loss.backward()
        stats = offload.stats()
    for layer, gradient in zip(net, expected, strict=True):
        assert torch.equal(layer.weight.grad, gradient)
    values = layers * rows * WIDTH
    assert stats.offloaded_bytes > 0
    assert values // 4 <= stats.offloaded_bytes + stats.kept_bytes
    assert 8 * (stats.stored_bytes + stats.kept_bytes) / values <= 2.1
