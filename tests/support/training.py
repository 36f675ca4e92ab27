"""What tests train, and how they compare it: with and without offload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import storm_client as storm
import torch
from torch import Tensor, nn

Context = Callable[[], AbstractContextManager[object]]
"""Makes the context that a forward runs in: an offload, or none."""

Case = Callable[[Context, str], list[Tensor]]
"""Trains on a device, the forward in a context; returns the loss and every gradient."""


def assert_identical(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare bit for bit: NaNs are equal to themselves, and zeros have signs."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(bits(one), bits(other)), f"value {index} differs"


def assert_offload_changes_nothing(run: Case, offload: storm.Offload, device: str) -> None:
    """Compare two steps with those without offload; what only a GPU's window allows may be kept."""
    expected = run(nullcontext, device)
    for _ in range(2):  # the second step has learned the order of the first
        assert_identical(run(lambda: offload, device), expected)
    stats = offload.stats()
    assert stats.offloaded_bytes > 0
    assert set(stats.kept) <= ({"needed_at_once"} if device == "cuda" else set()), stats.kept


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def trained(module: nn.Module, x: Tensor, context: Context) -> list[Tensor]:
    """Do one step of `module` on `x` with the square mean as loss."""
    with context():
        out = module(x)
        loss = out.float().square().mean()
    del out
    loss.backward()
    return [loss.detach(), *gradients(module), *([] if x.grad is None else [x.grad])]


def seeded(device: str, *shape: int, seed: int = 1, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device).requires_grad_(grad)


def small_net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh()).to(device)
