"""Steps of training, as a script has them: models and losses, optimizers, and four batches each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest
import storm_client as storm
import torch
from support.compiled_programs import blocks, perceptron
from support.training import seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

Step = Callable[..., object]
Wrap = Callable[[Step], Step]

STEPS = 4

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "adam_tensor_lr_fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
}


class Training(NamedTuple):
    """One program: what it trains, the loss of a batch, and what happens to the gradients."""

    net: nn.Module
    loss: Callable[[Tensor], Tensor]
    rows: tuple[int, ...]
    prepare: Callable[[], object] = lambda: None


PROGRAMS: dict[str, Callable[[str], Training]] = {}


def program(make: Callable[[str], Training]) -> Callable[[str], Training]:
    PROGRAMS[make.__name__] = make
    return make


def step_of(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    """Return a whole step, on the square mean of what the net makes."""

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def mean(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: net(x).float().square().mean()


@program
def a_transformer(device: str) -> Training:
    net = blocks(device, 1)
    return Training(net, mean(net), (2, 16, 32), lambda: clip_grad_norm_(net.parameters(), 0.1))


@program
def autocast(device: str) -> Training:
    net = perceptron(device)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return net(x).float().square().mean()

    return Training(net, loss, (16, 32), lambda: clip_grad_value_(net.parameters(), 1e-3))


@program
def dropout_and_batch_norm(device: str) -> Training:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Dropout(0.3), nn.ReLU(), nn.Linear(48, 8)
    ).to(device)
    return Training(net, mean(net), (16, 32))


@program
def convolutions(device: str) -> Training:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(128, 4),
    ).to(device)
    return Training(net, mean(net), (4, 3, 8, 8))


@program
def tied_and_frozen_weights(device: str) -> Training:
    torch.manual_seed(0)
    embedding, body = nn.Linear(16, 32).to(device), nn.Linear(16, 16).to(device)
    net = nn.ModuleList([embedding, body])
    body.bias.requires_grad_(False)

    def loss(x: Tensor) -> Tensor:
        hidden = body((x @ embedding.weight).tanh())
        return functional.linear(hidden, embedding.weight).square().mean()

    return Training(net, loss, (8, 32))


@program
def spectral_norm(device: str) -> Training:
    """Its forward pass changes a buffer and computes with it."""
    torch.manual_seed(0)
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 16)).to(device)
    return Training(net, mean(net), (8, 32))


@program
def two_backward_passes(device: str) -> Training:
    net = perceptron(device)

    def loss(x: Tensor) -> Tensor:
        net(x).tanh().sum().mul(1e-3).backward()
        return net(x + 1).square().mean()

    return Training(net, loss, (16, 32))


@program
def checkpointed(device: str) -> Training:
    net = perceptron(device)

    def loss(x: Tensor) -> Tensor:
        y = checkpoint(net[1], net[0](x).tanh(), use_reentrant=False)
        return net[2](y.exp()).square().mean()

    return Training(net, loss, (16, 32))


@program
def a_penalty_of_gradients(device: str) -> Training:
    net = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)

    def loss(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = net(x).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out * 1e-2 + (gradient.norm(dim=1) - 1).square().mean()

    return Training(net, loss, (8, 32))


@program
def writes_in_place(device: str) -> Training:
    net = perceptron(device)

    def loss(x: Tensor) -> Tensor:
        y = net(x)
        z = y + 1
        z[:, 2:5] = 0
        z.mul_(2).add_(y)
        z[0] += 1
        return z.exp().mean()

    return Training(net, loss, (16, 32))


def train(name: str, optimizer: str, wrap: Wrap, device: str, steps: int = STEPS) -> list[Tensor]:
    """Train, and return all that could differ: losses, parameters, buffers, state, generators."""
    torch.manual_seed(0)
    training = PROGRAMS[name](device)
    trained = [p for p in training.net.parameters() if p.requires_grad]
    update = OPTIMIZERS[optimizer](iter(trained))

    def step(x: Tensor) -> Tensor:
        loss = training.loss(x)
        loss.backward()
        training.prepare()
        update.step()
        update.zero_grad()
        return loss

    call = wrap(step)
    losses = [call(seeded(device, *training.rows, seed=n)) for n in range(steps)]
    return [*(one.detach() for one in losses), *everything(training.net, update, device)]


def descended(
    loss_of: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    target: Tensor,
    *,
    client: storm.Client | None,
    refused: Iterable[int],
) -> list[Tensor]:
    """Do a step of gradient descent, captured with a client; return its loss and the parameters.

    A captured step first rejects targets of each class in `refused`, by its number.
    """
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(target: Tensor) -> Tensor:
        loss = loss_of(target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step
    if client is not None:
        run = storm.compile_step(step, client=client, min_bytes=1, codegen="eager")
        for wrong in refused:
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                run(torch.full_like(target, wrong))
    return [run(target), *(one.detach() for one in parameters)]


def everything(net: nn.Module, optimizer: Optimizer, device: str) -> list[Tensor]:
    """Return all that a step may have changed."""
    found = [p.detach().clone() for p in net.parameters()]
    found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    found += [buffer.clone() for buffer in net.buffers()]
    for table in optimizer.state.values():
        found += [value.clone() for value in table.values() if isinstance(value, Tensor)]
    return [*found, torch.rand(4), torch.rand(4, device=device)]
