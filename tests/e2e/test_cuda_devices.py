"""One process that trains on several GPUs has a lane on each, and its gradients are right."""

from __future__ import annotations

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs 2 CUDA devices, {torch.cuda.device_count()} here",
    ),
    pytest.mark.timeout(300),
]

WIDTH, ROWS = 1024, 2048


def half(device: str) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers).to(device)


def gradients(
    halves: list[nn.Sequential], x: Tensor, offload: storm.Offload | None
) -> list[Tensor]:
    for one in halves:
        one.zero_grad(set_to_none=True)
    if offload is None:
        loss = halves[1](halves[0](x).to("cuda:1")).square().mean()
    else:
        with offload:
            loss = halves[1](halves[0](x).to("cuda:1")).square().mean()
    loss.backward()
    return [parameter.grad.clone() for one in halves for parameter in one.parameters()]


def test_a_model_on_two_devices_has_a_lane_on_each() -> None:
    torch.manual_seed(0)
    halves = [half("cuda:0"), half("cuda:1")]
    x = torch.randn(ROWS, WIDTH, device="cuda:0")
    expected = gradients(halves, x, None)
    flags = ["--pool-bytes=1GiB", "--staging-bytes-cuda=8MiB", "--part-bytes-cuda=2MiB"]
    with (
        ChildDaemon(flags=[*flags, "--device=cuda"], start_seconds=120.0) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        offload = client.offload(halves, min_bytes=1 << 16)
        for _ in range(5):
            assert all(map(torch.equal, gradients(halves, x, offload), expected))
        assert [one.device for one in client.status().sessions].count("cuda") == 2
        assert offload.stats().offloaded_bytes > 5 * 2 * 4 * ROWS * WIDTH * 4
