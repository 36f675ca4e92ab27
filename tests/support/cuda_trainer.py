"""A training process for tests: says after each step whether its gradients are the right ones.

    python tests/support/cuda_trainer.py ADDRESS STEPS

Prints "ready", then "same" or "different" after each step, and last "done", or the name of the
error that training ended with.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import storm_client as storm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, LAYERS, BATCH, LENGTH = 512, 4, 8, 512


def step(model: nn.Module, x: Tensor, context: AbstractContextManager[object]) -> list[Tensor]:
    """Return the gradients of one step."""
    with context:
        loss = model(x).float().square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def train(address: str, steps: int) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, device="cuda", dtype=torch.bfloat16
    )
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        expected = step(model, x, nullcontext())
        with storm.connect(address, embedded="never") as client:
            # With the least budget most steps would have no hooks: so little is kept.
            offload = client.offload(model, min_bytes=1 << 16, budget=0.0)
            print("ready", flush=True)
            for _ in range(steps):
                found = step(model, x, offload)
                same = all(map(torch.equal, found, expected))
                print("same" if same else "different", flush=True)
            stats = offload.stats()
            assert stats.offloaded_bytes > 0, stats


def main() -> None:
    try:
        train(sys.argv[1], int(sys.argv[2]))
    except storm.StormError as error:
        print(type(error).__name__, flush=True)
    else:
        print("done", flush=True)


if __name__ == "__main__":
    main()
