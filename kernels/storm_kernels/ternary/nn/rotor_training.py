"""Trains a SimpleRotorNet with latent weights in torch, and folds the result into planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import UsageError
from ..planes import Array
from ..tensor import TernaryTensor
from .rotor_net import THRESHOLD
from .rounding import rounded_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .rotor_net import SimpleRotorNet

__all__ = ["Trained", "train"]

REACH: Final = 1.5
"""Values beyond +-REACH pass no gradient: their sign is settled."""

MIN_SIZE: Final = 1e-3
"""The minimum standard deviation of an input, so that a constant input does not divide by 0."""


@dataclass(frozen=True)
class Trained:
    """The parameters of a network after training, and the losses."""

    weights: tuple[TernaryTensor, TernaryTensor]
    vectors: dict[str, NDArray[np.float32]]
    losses: list[float]


def train(
    net: SimpleRotorNet, x: Array, y: Array, *, epochs: int, batch: int, rate: float, seed: int
) -> Trained:
    """Train new latent weights. Raises UsageError for shapes that do not match the network."""
    inputs, classes = torch.as_tensor(x).float(), torch.as_tensor(y).long()
    if inputs.ndim != 2 or inputs.shape[1] != net.inputs or classes.shape != inputs.shape[:1]:
        raise UsageError(
            f"x is {tuple(inputs.shape)}, y {tuple(classes.shape)}; give (samples, {net.inputs}) "
            "and (samples,)"
        )
    generator = torch.Generator().manual_seed(seed)
    model = _Latent(net, inputs, generator).to(inputs.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    steps = epochs * -(-inputs.shape[0] // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    losses = []
    for _ in range(epochs):
        total = 0.0
        order = torch.randperm(inputs.shape[0], generator=generator).to(inputs.device)
        for first in range(0, order.numel(), batch):
            part = order[first : first + batch]
            if part.numel() < 2 and inputs.shape[0] > 1:
                continue  # a batch of one has no variance for the batch norm
            loss = nn.functional.cross_entropy(model(inputs[part]), classes[part])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * part.numel()
        losses.append(total / inputs.shape[0])
    return model.eval().folded(losses)


class _Signs(torch.autograd.Function):
    """Forward: the signs of values beyond +-1/2. Backward: the identity within +-REACH."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > THRESHOLD).to(x.dtype) - (x < -THRESHOLD).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        passed: Tensor = gradients[0] * (x.abs() <= REACH)
        return passed


_signs: Any = _Signs.apply


class _Latent(nn.Module):
    """The network with latent weights, and batch norms that become scales and shifts."""

    def __init__(self, net: SimpleRotorNet, x: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self.mean = x.mean(0)
        self.size = x.std(0, unbiased=False).clamp(min=MIN_SIZE)
        shapes = (net.hidden, net.inputs), (net.outputs, net.hidden)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(shape, generator=generator) * shape[1] ** -0.5)
            for shape in shapes
        )
        self.norm1, self.norm2 = nn.BatchNorm1d(net.hidden), nn.BatchNorm1d(net.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, as the folded network computes them."""
        first: Tensor = _signs((x - self.mean) / self.size)
        hidden = self.norm1(first @ self._through(self.w1).T)
        second: Tensor = _signs(hidden)
        outputs: Tensor = self.norm2(second @ self._through(self.w2).T)
        return outputs

    @staticmethod
    def _through(weight: Tensor) -> Tensor:
        signs, _ = rounded_rows(weight)
        return weight + (signs.to(weight.dtype) - weight).detach()

    def folded(self, losses: list[float]) -> Trained:
        """Return the signs as planes, and each batch norm as a gain and a shift."""
        vectors = {"mean": self.mean, "size": self.size}
        for number, norm in (("1", self.norm1), ("2", self.norm2)):
            assert norm.running_var is not None
            assert norm.running_mean is not None
            gain = norm.weight / (norm.running_var + norm.eps).sqrt()
            vectors[f"gain{number}"] = gain
            vectors[f"shift{number}"] = norm.bias - norm.running_mean * gain
        plain = {
            name: one.detach().cpu().numpy().astype(np.float32) for name, one in vectors.items()
        }
        first, second = (
            TernaryTensor.encode(rounded_rows(weight)[0].cpu().numpy())
            for weight in (self.w1, self.w2)
        )
        return Trained((first, second), plain, losses)
