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
from support.tiny_llama import tiny_llama, token_rows
from support.training import Context, assert_identical
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

WIDTH, ROWS, LAYERS, STEPS = 16, 64, 2, 13
BUDGETS = ["least", 0.5, 1 << 15]


class GradientCheckpointingLayer(nn.Module):
    """A layer that declares, as those of transformers, that it may be called again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Program(nn.Module):
    """A model, and how it is trained; the programs below do parts of that otherwise."""

    layer: type[nn.Module] = GradientCheckpointingLayer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def before(self, number: int) -> None:
        """Do what comes before a step's forward pass."""

    def between(self, number: int) -> None:
        """Do what lies between the passes."""

    def loss(self, x: Tensor) -> Tensor:
        return self(x)

    def noted(self) -> list[object]:
        """Return what else has to be the same."""
        return []


PROGRAMS: dict[str, type[Program]] = {}


def program(kind: type[Program]) -> type[Program]:
    PROGRAMS[kind.__name__] = kind
    return kind


@program
class FunctionalCall(Program):
    """The forward pass alone has other weights."""

    def loss(self, x: Tensor) -> Tensor:
        return functional_call(self, {n: 2 * p for n, p in self.named_parameters()}, (x,))


@program
class AveragedWeights(Program):
    """The forward pass is that of an average, whose tensors are the modules' for that long."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {name: p.detach().clone() for name, p in self.named_parameters()}

    def swap(self) -> None:
        for name, p in self.named_parameters():
            p.data, self.average[name] = self.average[name], p.data

    def before(self, number: int) -> None:
        for name, p in self.named_parameters():
            self.average[name] = self.average[name].lerp(p.detach(), 0.1)
        self.swap()

    def between(self, number: int) -> None:
        self.swap()


class WritesToSome(GradientCheckpointingLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.amax() > 3.2:
            x.clamp_(max=3.0)
        return super().forward(x)


@program
class WritesForSomeData(Program):
    """A layer writes to what it was given, for some data alone."""

    layer = WritesToSome


class AsksForGradients(GradientCheckpointingLayer):
    def forward(self, x: Tensor) -> Tensor:
        coordinates = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.up(coordinates).sum(), coordinates, create_graph=True)
        return super().forward(x) + slope


@program
class RequiresGradInside(Program):
    layer = AsksForGradients


class Casts(GradientCheckpointingLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.linear(x.double(), self.up.weight.double()).sum()


@program
class SharedCasts(Program):
    """Autocast's casts of weights are used outside of the layers too, and in another type."""

    layer = Casts

    def loss(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outside = functional.linear(x, self.layers[0].up.weight).float().mean()
            return self(x) + outside


GENERATOR = torch.Generator()


class Drawing(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.sources = [torch.Generator().manual_seed(3), random.Random(4)]

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=GENERATOR)
        noise = noise + torch.randn(x.shape, generator=self.sources[0])
        return super().forward(functional.dropout(x, 0.1)) + noise * self.sources[1].random()


@program
class Generators(Program):
    """Generators that are global, or in lists."""

    layer = Drawing

    def __init__(self) -> None:
        super().__init__()
        GENERATOR.manual_seed(2)

    def noted(self) -> list[object]:
        drawn = [one.sources[1].random() for one in self.layers]
        return [*drawn, GENERATOR.get_state().tolist(), torch.rand(1).item()]


def train(kind: type[Program], make: Callable[[Program], Context]) -> list[object]:
    """Train a new model in what `make` returns for it; return all losses and what is left."""
    random.seed(5)
    torch.manual_seed(0)
    net = kind()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    context = make(net)
    found: list[object] = []
    for number in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        net.before(number)
        with context():
            loss = net.loss(x)
        net.between(number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
        found = [one.clone() if isinstance(one, Tensor) else one for one in found]
    return [*found, *(p.detach() for p in net.parameters()), *net.noted()]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_train_with_the_bits_that_they_have_without(
    client: storm.Client, name: str, budget: Any
) -> None:
    def offloaded(net: Program) -> Context:
        offload = client.offload(net, min_bytes=1, budget=budget)
        return lambda: offload

    expected = train(PROGRAMS[name], lambda _: nullcontext)
    found = train(PROGRAMS[name], offloaded)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            assert_identical([one], [other])
        else:
            assert one == other


@contextmanager
def counted(net: nn.Module) -> Iterator[Counter[int]]:
    """Count the calls of all forwards."""
    calls: Counter[int] = Counter()

    def counting(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[id(module)] += 1
            return forward(*args, **kwargs)

        return call

    for module in net.modules():
        module.forward = counting(module)
    yield calls
    for module in net.modules():
        del module.forward


@pytest.mark.parametrize("budget", [*BUDGETS, "fit", 0.0, 1.0], ids=str)
@pytest.mark.parametrize("kind", ["own", "llama"])
def test_no_module_is_called_twice_unless_it_is_named(
    client: storm.Client, kind: str, budget: Any
) -> None:
    steps = 20
    net = Program() if kind == "own" else tiny_llama()
    rows = {name: torch.stack([row[name] for row in token_rows(2)]) for name in token_rows(1)[0]}
    budget = 1 << 20 if kind == "llama" and type(budget) is int else budget
    offload = client.offload(net, min_bytes=1, budget=budget)
    with counted(net) as calls:
        for _ in range(steps):
            with offload:
                loss = net(torch.ones(ROWS, WIDTH)) if kind == "own" else net(**rows).loss
            loss.backward()
    assert calls
    assert set(calls.values()) == {steps}
    assert offload.plan is not None
