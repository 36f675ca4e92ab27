"""Ternary models through a real daemon: shared by processes, and trained with offload."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_client.ternary import load_model, put_model
from storm_kernels.ternary.nn import TernaryLinear, convert
from torch import nn

WIDTH, MIB = 512, 1 << 20

USER = f"""
import json, sys, torch
import storm_client as storm
from storm_client.ternary import load_model
from storm_kernels.ternary.nn import convert
from torch import nn
with torch.device("meta"):
    model = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, 8))
from storm_kernels.ternary.nn import TernaryLinear
for place in (0, 2):
    linear = model[place]
    model[place] = TernaryLinear.empty(linear.in_features, linear.out_features, device="meta")
with storm.connect(sys.argv[1], embedded="never") as client:
    assert load_model(client.cache, "net", model)
x = torch.arange(3 * {WIDTH}, dtype=torch.float32).reshape(3, {WIDTH}).sin()
own = sum(t.nbytes for t in model.state_dict().values())
print(json.dumps([model(x).tolist(), own]))
"""


@pytest.fixture
def daemon() -> Iterator[ChildDaemon]:
    flags = ["--pool-bytes=256MiB", "--cache-bytes=32MiB", "--device=cpu"]
    with ChildDaemon(flags=flags) as daemon:
        yield daemon


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))


def test_processes_share_a_model_that_was_put_once(daemon: ChildDaemon) -> None:
    net = model()
    dense = sum(tensor.nbytes for tensor in net.state_dict().values())
    report = convert(net)
    x = torch.arange(3 * WIDTH, dtype=torch.float32).reshape(3, WIDTH).sin()
    with storm.connect(daemon.address, embedded="never") as client:
        put = put_model(client.cache, "net", net)
        assert put < dense / 8
        assert put == report.bytes_after + 4 * (WIDTH + 8)
        cached = client.status().cache
        # One copy in the daemon, of two bits a weight; ANCF adds a header a tensor.
        assert cached.used_bytes < put + 4096
        users = [
            subprocess.Popen(
                [sys.executable, "-c", USER, daemon.address],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for user in users:
            out, complaint = user.communicate(timeout=200)
            assert user.returncode == 0, complaint
            y, own = json.loads(out)
            assert torch.equal(torch.tensor(y), net(x))
            assert own == put  # planes: nothing was widened on the way
        assert client.status().cache.used_bytes == cached.used_bytes


def test_what_is_no_model_is_told(daemon: ChildDaemon) -> None:
    with storm.connect(daemon.address, embedded="never") as client:
        assert not load_model(client.cache, "missing", model())
        client.cache.put("noise", torch.arange(9, dtype=torch.uint8))
        with pytest.raises(storm.CorruptBlob, match="no model"):
            load_model(client.cache, "noise", model())
        net = model()
        with pytest.raises(storm.UsageError, match="freeze"):
            put_model(client.cache, "net", nn.Sequential(TernaryLinear(4, 4)))
        convert(net)
        put_model(client.cache, "net", net)
        with pytest.raises(storm.UsageError, match="differ in"):
            load_model(client.cache, "net", model())
        client.cache.delete("net/0.bit0")
        assert not load_model(client.cache, "net", net)


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
