"""Trains on the second GPU and makes it the current one nowhere, as a script of its own."""

from __future__ import annotations

import sys

import storm_client as storm
import torch
from torch import nn


def main(address: str) -> None:
    """Train with offload at `address`, then look where this process has a context."""
    torch.manual_seed(0)
    device = torch.device("cuda", 1)
    blocks = [nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]
    net = nn.Sequential(*blocks).to(device)
    x = torch.randn(2048, 1024).to(device)
    with storm.connect(address, embedded="never", timeout=30.0) as client:
        offload = client.offload(net, min_bytes=1 << 16)
        for _ in range(16):
            with offload:
                loss = net(x).square().mean()
            loss.backward()
        assert offload.stats().offloaded_bytes + offload.stats().replayed_bytes > 0
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # torch's gap
    assert has_context(1)
    assert not has_context(0), "a context was made on a device that nothing lies on"


if __name__ == "__main__":
    main(sys.argv[1])
