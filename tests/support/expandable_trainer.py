"""A training process whose tensors lie in expandable segments, for tests.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \\
        python tests/support/expandable_trainer.py ADDRESS STEPS

Prints "ready", then after each step "same" or "different", as its gradients are, and how many
tensors the daemon was to use where they are; last "done". Half-way PyTorch's cache is emptied.
Before the last line comes "held" and by how many bytes the device has less memory since then that
PyTorch does not hold.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import storm_client as storm
import torch
from cuda_trainer import step
from storm_client.lanes.segments import Segments
from torch import nn


class Counted(Segments):
    """Counts what is found."""

    found = 0

    def find(self, address: int, nbytes: int) -> Any:
        place = super().find(address, nbytes)
        Counted.found += place is not None
        return place


def others_bytes() -> int:
    """Return how much of the device is neither free nor PyTorch's."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def train(address: str, steps: int) -> None:
    torch.manual_seed(0)
    wide = [
        nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)
    ]
    model = nn.Sequential(*wide).to("cuda")
    x = torch.randn(4096, 1024, device="cuda")
    expected = step(model, x, nullcontext())
    with storm.connect(address, embedded="never") as client:
        offload = client.offload(model, min_bytes=1 << 16, budget=0.0)
        print("ready", flush=True)
        before = 0
        for number in range(steps):
            if number == steps // 2:
                before = others_bytes()
                torch.cuda.empty_cache()
            Counted.found = 0
            same = all(map(torch.equal, step(model, x, offload), expected))
            print("same" if same else "different", Counted.found, flush=True)
        print("held", others_bytes() - before, flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    import storm_client.lanes.cuda

    storm_client.lanes.cuda.Segments = Counted  # type: ignore[misc]
    train(sys.argv[1], int(sys.argv[2]))
