"""What compiled models train in tests: the same program compiled by PyTorch and by this backend."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from support.training import gradients, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Wrap = Callable[[Callable[..., object]], Callable[..., Tensor]]
"""Compiles a module or a function."""

Program = Callable[[Wrap, str], list[Tensor]]

PROGRAMS: dict[str, Program] = {}

PLAIN = {"eager": "aot_eager", "inductor": "inductor"}
"""By who generates the code, PyTorch's backend that is the same without offload."""


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def perceptron(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3)]
    return nn.Sequential(*layers).to(device)


class Attention(nn.Module):
    """The first half of a decoder block as many models have it: RMSNorm, rotary attention."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).split(w, dim=-1)
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        angle = torch.arange(t, device=x.device, dtype=x.dtype)[:, None] * 0.1
        q = q * angle.cos() + q.flip(-1) * angle.sin()
        k = k * angle.cos() + k.flip(-1) * angle.sin()
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, w))


class GatedMlp(nn.Module):
    """The second half: RMSNorm, a gated MLP."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Block(nn.Sequential):
    """Both halves."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__(Attention(width, heads), GatedMlp(width))


def blocks(device: str, count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).to(device)


def trained(call: Callable[..., Tensor], net: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Do two steps; a net that is called twice uses what it has learned."""
    losses = []
    for _ in range(2):
        loss = call(*inputs).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    inputs_ = [x.grad for x in inputs if x.grad is not None]
    return [*losses, *inputs_, *gradients(net)]


@program
def a_transformer(wrap: Wrap, device: str) -> list[Tensor]:
    net = blocks(device, 1)
    return trained(wrap(net), net, seeded(device, 2, 16, 32, grad=True))


@program
def blocks_of_their_own(wrap: Wrap, device: str) -> list[Tensor]:
    nets = [blocks(device, 1) for _ in range(2)]
    calls = [wrap(net) for net in nets]

    def model(x: Tensor) -> Tensor:
        for call in calls:
            x = call(x)
        return x

    return trained(model, nn.ModuleList(nets), seeded(device, 2, 16, 32))


@program
def half_precision(wrap: Wrap, device: str) -> list[Tensor]:
    net = blocks(device, 1).to(torch.bfloat16)
    return trained(wrap(net), net, seeded(device, 2, 16, 32).to(torch.bfloat16))


@program
def half_precision_used_further(wrap: Wrap, device: str) -> list[Tensor]:
    """What is saved and used by fused operations besides: rounded for both, or for neither."""
    first, second = (
        seeded(device, 32, 32, seed=n).to(torch.bfloat16).requires_grad_() for n in (1, 2)
    )

    def model(x: Tensor) -> Tensor:
        for _ in range(3):
            y = ((x @ first) * 0.11).sigmoid()
            x = y @ second + (y.sin() * 1.3 + y).cos()
        return x

    loss = wrap(model)(seeded(device, 64, 32).to(torch.bfloat16)).float().square().mean()
    loss.backward()
    return [loss.detach(), first.grad, second.grad]


@program
def autocast(wrap: Wrap, device: str) -> list[Tensor]:
    net = perceptron(device)
    call = wrap(net)

    def model(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return call(x)

    return trained(model, net, seeded(device, 16, 32))


@program
def convolutions(wrap: Wrap, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    ).to(device)
    found = trained(wrap(net), net, seeded(device, 4, 3, 8, 8))
    return [*found, *net.buffers()]


@program
def a_recurrent_net(wrap: Wrap, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    cell = nn.GRUCell(8, 16).to(device)

    def unrolled(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 16)
        for t in range(x.shape[0]):
            h = cell(x[t], h)
        return h

    return trained(wrap(unrolled), cell, seeded(device, 4, 6, 8))


@program
def tied_weights(wrap: Wrap, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    embedding = nn.Embedding(40, 16).to(device)
    body = nn.Linear(16, 16).to(device)
    numbers = torch.arange(24, device=device).view(2, 12)

    def model(numbers: Tensor) -> Tensor:
        return functional.linear(body(embedding(numbers)).tanh(), embedding.weight)

    return trained(wrap(model), nn.ModuleList([embedding, body]), numbers)


@program
def graph_breaks(wrap: Wrap, device: str) -> list[Tensor]:
    net = perceptron(device)

    def model(x: Tensor) -> Tensor:
        y = net[0](x).tanh()
        torch._dynamo.graph_break()
        y = net[1](y).sigmoid() * y
        torch._dynamo.graph_break()
        return net[2](y)

    return trained(wrap(model), net, seeded(device, 16, 32))


@program
def checkpointed_inside(wrap: Wrap, device: str) -> list[Tensor]:
    net = perceptron(device)

    def model(x: Tensor) -> Tensor:
        y = net[0](x).tanh()
        y = checkpoint(net[1], y, use_reentrant=False)
        return net[2](y.exp())

    return trained(wrap(model), net, seeded(device, 16, 32))


@program
def outputs_that_view_what_is_saved(wrap: Wrap, device: str) -> list[Tensor]:
    net = perceptron(device)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = net(x).exp()
        return y[:8], y.t()

    call = wrap(model)
    x = seeded(device, 16, 32, grad=True)
    first, second = call(x)
    (first.sum() + second.square().sum()).backward()
    return [first.detach(), second.detach(), x.grad, *gradients(net)]


@program
def views_and_strides(wrap: Wrap, device: str) -> list[Tensor]:
    weight = seeded(device, 32, 32, grad=True)

    def model(x: Tensor) -> Tensor:
        y = (x @ weight).sigmoid()
        a, b = y.t().chunk(2)
        return (a * b).exp() @ y[:, ::2]

    x = seeded(device, 32, 32, grad=True)
    loss = wrap(model)(x).sum()
    loss.backward()
    return [loss.detach(), x.grad, weight.grad]


@program
def dropout(wrap: Wrap, device: str) -> list[Tensor]:
    net = nn.Sequential(perceptron(device), nn.Dropout(0.5), perceptron(device))
    call = wrap(net)
    torch.manual_seed(7)
    return trained(call, net, seeded(device, 16, 32))


@program
def what_is_saved_and_then_overwritten(wrap: Wrap, device: str) -> list[Tensor]:
    """Functionalization turns writes into scatters, which a compiler does in place."""
    weight = seeded(device, 16, 16, grad=True)

    def model(x: Tensor) -> Tensor:
        y = (x @ weight).sigmoid()
        z = y.clone()
        z[2:5] = 0
        index = torch.tensor([0, 3], device=x.device)
        z = z.index_put((index,), y[:2])
        return z.exp() * y

    x = seeded(device, 16, 16, grad=True)
    loss = wrap(model)(x).sum()
    loss.backward()
    return [loss.detach(), x.grad, weight.grad]


@program
def several_backward_passes(wrap: Wrap, device: str) -> list[Tensor]:
    net = perceptron(device)
    call = wrap(net)
    x = seeded(device, 16, 32, grad=True)
    with torch._functorch.config.patch(donated_buffer=False):
        out = call(x).square()
        out.sum().backward(retain_graph=True)
        out.mean().backward(retain_graph=True)
        out.max().backward()
    return [x.grad, *gradients(net)]


@program
def shapes_that_vary(wrap: Wrap, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = Attention().to(device)
    call = wrap(net)
    found = []
    for length in (8, 12, 20):
        loss = call(seeded(device, 2, length, 32)).square().mean()
        loss.backward()
        found.append(loss.detach())
    return [*found, *gradients(net)]


@program
def lengths_rounded_up(wrap: Wrap, device: str) -> list[Tensor]:
    """As attention's kernels round the lengths of what they save."""
    net = perceptron(device)

    def padded(x: Tensor) -> Tensor:
        whole = math.ceil(x.shape[0] / 8) * 8
        y = functional.pad(x, (0, 0, 0, whole - x.shape[0]))
        return net(y.exp())

    call = wrap(padded)
    found = []
    for length in (5, 8, 19):
        loss = call(seeded(device, length, 32)).square().mean()
        loss.backward()
        found.append(loss.detach())
    return [*found, *gradients(net)]


IN_GENERATED_CODE = (
    "half_precision",
    "half_precision_used_further",
    "convolutions",
    "what_is_saved_and_then_overwritten",
    "shapes_that_vary",
    "lengths_rounded_up",
)
"""Those that are compared where Inductor generates the code, which takes seconds each."""
