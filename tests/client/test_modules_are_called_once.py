"""Without `layers=` no module is called a second time, whatever a step of training does.

The programs are such as a second call would do otherwise: it would read other weights, write
again, draw again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import storm_client as storm
import torch
from support.training import Context, assert_identical
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

WIDTH, ROWS, LAYERS, STEPS = 16, 64, 2, 13


class GradientCheckpointingLayer(nn.Module):
    """A layer that declares, as those of transformers, that it may be called again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class WritesForSomeData(GradientCheckpointingLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.amax() > 3.2:
            x.clamp_(max=3.0)
        return super().forward(x)


GENERATOR = torch.Generator()


class Draws(GradientCheckpointingLayer):
    """Of generators that are global, or in a list."""

    def __init__(self) -> None:
        super().__init__()
        GENERATOR.manual_seed(2)
        self.sources = [torch.Generator().manual_seed(3), random.Random(4)]

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=GENERATOR)
        noise = noise + torch.randn(x.shape, generator=self.sources[0])
        return super().forward(functional.dropout(x, 0.1)) + noise * self.sources[1].random()


class Net(nn.Module):
    """Layers in a row, with an average of their weights."""

    def __init__(self, layer: type[nn.Module] = GradientCheckpointingLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.average = {name: p.detach().clone() for name, p in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def swap(self) -> None:
        for name, p in self.named_parameters():
            p.data, self.average[name] = self.average[name], p.data

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the average be the weights of the forward pass alone."""
        for name, p in self.named_parameters():
            self.average[name] = self.average[name].lerp(p.detach(), 0.1)
        self.swap()
        yield
        self.swap()


def with_other_weights(net: Net, x: Tensor) -> Tensor:
    return functional_call(net, {name: 2 * p for name, p in net.named_parameters()}, (x,))


def train(program: str, make: Callable[[Net], Context]) -> list[Tensor]:
    """Train a new model in what `make` returns for it; return all losses and what is left."""
    random.seed(5)
    torch.manual_seed(0)
    net = Net(
        {"writes": WritesForSomeData, "draws": Draws}.get(program, GradientCheckpointingLayer)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    context = make(net)
    found: list[Tensor] = []
    for number in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        with net.averaged() if program == "average" else nullcontext(), context():
            loss = with_other_weights(net, x) if program == "functional_call" else net(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [one.clone() for one in (loss.detach(), *(p.grad for p in net.parameters()))]
    drawn = [GENERATOR.get_state(), torch.rand(1)]
    drawn += [torch.tensor(one.sources[1].random()) for one in net.layers if isinstance(one, Draws)]
    return [*found, *(p.detach() for p in net.parameters()), *drawn]


@pytest.mark.parametrize("budget", ["least", 0.5], ids=str)
@pytest.mark.parametrize("program", ["functional_call", "average", "writes", "draws"])
def test_programs_train_with_the_bits_that_they_have_without(
    client: storm.Client, program: str, budget: Any
) -> None:
    def offloaded(net: Net) -> Context:
        offload = client.offload(net, min_bytes=1, budget=budget)
        return lambda: offload

    assert_identical(train(program, offloaded), train(program, lambda _: nullcontext))


def counting(forward: Callable[..., Any], calls: Counter[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[id(forward.__self__)] += 1
        return forward(*args, **kwargs)

    return call


@pytest.mark.parametrize("budget", ["least", 0.0, 0.5, 1 << 15, "fit"], ids=str)
def test_no_module_is_called_twice_unless_it_is_named(client: storm.Client, budget: Any) -> None:
    steps, calls, net = 20, Counter[int](), Net()
    offload = client.offload(net, min_bytes=1, budget=budget)
    for module in net.modules():
        module.forward = counting(module.forward, calls)
    for _ in range(steps):
        with offload:
            loss = net(torch.ones(ROWS, WIDTH))
        loss.backward()
    assert set(calls.values()) == {steps}
    assert offload.plan is not None
