"""Losses and gradients with offload are bit for bit those without, whatever is trained.

Each case builds what it trains from a fixed seed, runs the forward inside the context that it is
given and the backward after it, and returns the loss and every gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from support.training import (
    Case,
    Context,
    assert_offload_changes_nothing,
    gradients,
    seeded,
    trained,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Add a function to the cases that are tested."""
    CASES[function.__name__] = function
    return function


# --- modules --------------------------------------------------------------------------------


@case
def mlp(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU()).to(device)
    return trained(net, seeded(device, 128, 64), context)


@case
def convolutions_with_batch_norm_and_inplace_relu(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(10),
    ).to(device)
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        return trained(net, seeded(device, 4, 3, 32, 32), context)


@case
def lstm(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(16, 32, num_layers=2, batch_first=True)
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    return trained(Net().to(device), seeded(device, 8, 12, 16), context)


@case
def transformer_with_dropout(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.MATH):
        return trained(net, seeded(device, 4, 16, 32), context)


@case
def shared_weights(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.mix = nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.mix(torch.tanh(self.mix(self.embed(ids))))
            return F.linear(hidden, self.embed.weight)

    net = Net().to(device)
    ids = torch.arange(40, device=device).reshape(4, 10)
    with context():
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    return [loss.detach(), *gradients(net)]


# --- tensors --------------------------------------------------------------------------------


def of_function(function: Callable[[Tensor], Tensor], x: Tensor, context: Context) -> list[Tensor]:
    with context():
        loss = function(x)
    (gradient,) = torch.autograd.grad(loss, x)
    return [loss.detach(), gradient]


@case
def views_and_transposes(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        h = x * 2
        q, k, v = h.view(8, 16, 3).unbind(-1)
        return (q @ k.t() @ v * h[:8, :16]).sum() + (h.t() @ h).tanh().sum()

    return of_function(function, seeded(device, 8, 48, grad=True), context)


@case
def one_tensor_saved_by_several_operations(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        h = x.exp()
        return (h * h + h.sin() + h**3 + h.sigmoid() * h).sum()

    return of_function(function, seeded(device, 64, 64, grad=True), context)


@case
def expanded(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        wide = x.exp().unsqueeze(0).expand(16, 64, 32)
        return (wide * wide.flip(1)).cos().sum()

    return of_function(function, seeded(device, 64, 32, grad=True), context)


@case
def zero_size(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        nothing = x[:0].exp()
        return (nothing * nothing).sum() + x.exp().square().sum()

    return of_function(function, seeded(device, 32, 32, grad=True), context)


@case
def strided(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        h = x * 3
        steps, corner = h[::3, 1::2], h[40:44, 40:44]
        strange = h.as_strided((5, 7), (11, 3), 17)
        return (steps.exp() * steps).sum() + corner.square().sum() + (strange * strange).sum()

    return of_function(function, seeded(device, 64, 64, grad=True), context)


@case
def small_view_of_a_large_storage(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        h = x * 3
        return (h[5:7] * h[5:7]).sum() + (h[6:9] * h[6:9]).sum() + (h * h).sum()

    return of_function(function, seeded(device, 256, 64, grad=True), context)


@case
def complex_numbers(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        z = torch.fft.fft(x)
        w = z * z.conj() + z.conj().t().contiguous().t().exp()
        return (torch.view_as_real(w) * w.real.unsqueeze(-1)).sum() + (z.conj().imag * x).sum()

    return of_function(function, seeded(device, 16, 16, grad=True), context)


@case
def float64(context: Context, device: str) -> list[Tensor]:
    x = seeded(device, 32, 32).double().requires_grad_()
    return of_function(lambda t: (t.exp() * t.tanh()).sum(), x, context)


@case
def integers_and_booleans(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        order = x.argsort(dim=1)
        picked = x.gather(1, order)
        masked = torch.where(picked > 0, picked.exp(), picked * 2)
        return (masked.masked_fill(x > 1, 0.5) * x[order[0] % 8]).sum()

    return of_function(function, seeded(device, 32, 32, grad=True), context)


@case
def half_precisions(context: Context, device: str) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        low, half = x.bfloat16().exp(), x.half().tanh()
        return (low * low).float().sum() + (half * half).float().sum()

    return of_function(function, seeded(device, 64, 64, grad=True), context)


@case
def special_values(context: Context, device: str) -> list[Tensor]:
    x = seeded(device, 64, 64)
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = float("inf"), -0.0, float("-inf"), 1e-42
    x.requires_grad_()
    return of_function(lambda t: (t.sigmoid() * t.clamp(-9, 9) * t.clamp(-9, 9)).sum(), x, context)


@case
def autocast(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 8))
    net = net.to(device)
    x = seeded(device, 32, 64)
    with context(), torch.autocast(device, dtype=torch.bfloat16):
        loss = net(x).square().mean()
    loss.backward()
    return [loss.detach(), *gradients(net)]


@pytest.mark.parametrize("codec", ["ancf", "raw"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_identical(
    name: str, codec: str, device: str, client: storm.Client
) -> None:
    offload = client.offload(min_bytes=1, codec=codec)
    assert_offload_changes_nothing(CASES[name], offload, device)
