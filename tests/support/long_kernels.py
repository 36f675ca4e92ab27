"""A process that saves large tensors right before products that leave the GPU no room.

    stormd run --mps on -- python tests/support/long_kernels.py CODEC

Prints, as JSON, whether each came back with its bits, and how many bytes the daemon stored in which
mode.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import storm_client as storm
import torch
from torch import Tensor

MIB = 1 << 20
STEPS = 4
TENSORS = 24
PRODUCTS = 6
SIDE = {"cpu": 256, "cuda": 16384}
"""Of the squares that are multiplied: on a GPU each takes 10 ms or so."""

TENSOR_BYTES = {"cpu": MIB, "cuda": 48 * MIB}


class Save(torch.autograd.Function):
    """Saves tensors; in the backward pass `back` holds what came of them."""

    back: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        Save.back = ctx.saved_tensors
        return grad, *[None] * len(Save.back)


def step(offload: storm.Offload, leaf: Tensor, square: Tensor, seed: int) -> bool:
    """Save tensors before long products; tell whether all came back as they were."""
    with offload:
        results = [tensor.requires_grad_() * 1 for tensor in random_tensors(leaf.device, seed)]
        outputs = [Save.apply(leaf, result) for result in results]
        del results
        for _ in range(PRODUCTS):
            torch.mm(square, square)
    expected = random_tensors(leaf.device, seed)
    return all(is_back(outputs.pop(), expected.pop()) for _ in range(TENSORS))


def random_tensors(device: torch.device, seed: int) -> list[Tensor]:
    """Return bfloat16 N(0,1), the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    count = TENSOR_BYTES[device.type] // 2
    return [
        torch.randn(count, device=device, dtype=torch.bfloat16, generator=generator)
        for _ in range(TENSORS)
    ]


def is_back(output: Tensor, expected: Tensor) -> bool:
    """Tell whether what was saved for an output has the expected bits."""
    output.sum().backward()
    (found,), Save.back = Save.back, ()
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    square = torch.randn(SIDE[device], SIDE[device], device=device).bfloat16()
    leaf = torch.zeros(1, device=device, requires_grad=True)
    with storm.connect(embedded="never", timeout=30.0) as client:
        offload = client.offload(torch.nn.Identity(), min_bytes=MIB, codec=sys.argv[1])
        same = [step(offload, leaf, square, seed) for seed in range(STEPS)]
        stats = offload.stats()
    print(json.dumps({"same": same, "stored_by_mode": dict(stats.stored_by_mode)}))


if __name__ == "__main__":
    main()
