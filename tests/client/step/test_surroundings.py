"""What a captured step reads besides its arguments: a change takes effect, or is refused."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import storm_client as storm
import torch
from storm_client.compile import partition
from storm_client.errors import UsageError
from storm_client.planner.machine import CPU
from storm_client.step.compiled import CompiledStep
from support.steps import everything
from support.training import assert_identical, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""Of PyTorch's own, where it compiles."""


@pytest.fixture
def wrap(client: storm.Client) -> Callable[..., CompiledStep]:
    return partial(storm.compile_step, client=client, min_bytes=1, codegen="eager")


class Trainer:
    """What many scripts have: an object with a model, an optimizer and settings."""

    def __init__(self, kind: str = "adamw") -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        trained = self.net.parameters()
        if kind == "adamw":
            self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        else:
            self.optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        self.scale = 1.0
        self.settings = {"power": 2.0}
        self.weights = [1.0]
        self.history: list[Tensor] = []
        self.count = 0

    def step(self, x: Tensor) -> Tensor:
        loss = self.net(x).abs().pow(self.settings["power"]).mean() * self.scale * self.weights[0]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


Change = Callable[[Trainer], object]


def another_optimizer(trainer: Trainer) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.net.parameters(), lr=0.1)


def another_model(trainer: Trainer) -> None:
    trainer.net = copy.deepcopy(trainer.net)
    another_optimizer(trainer)


def a_state_that_was(trainer: Trainer) -> None:
    """A group that is loaded is another table, whose settings are followed from then on."""
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    trainer.optimizer.param_groups[0]["lr"] = 0.3


def assigned_parameters(trainer: Trainer) -> None:
    """The optimizer goes on with the old ones."""
    state = {key: (value * 0.5).requires_grad_() for key, value in trainer.net.state_dict().items()}
    trainer.net.load_state_dict(state, assign=True)


CHANGES: dict[str, Change] = {
    "another optimizer": another_optimizer,
    "another model": another_model,
    "a state that was": a_state_that_was,
    "no state": lambda trainer: trainer.optimizer.state.clear(),
    "assigned parameters": assigned_parameters,
    "an attribute": lambda trainer: setattr(trainer, "scale", 3.0),
    "a table": lambda trainer: trainer.settings.update(power=3.0),
    "a list": lambda trainer: trainer.weights.__setitem__(0, 2.0),
    "a module's hook": lambda trainer: trainer.net[0].register_forward_hook(lambda *a: a[-1] * 2),
    "a parameter's hook": lambda trainer: trainer.net[0].weight.register_hook(lambda g: g * 2),
}


def trained(trainer: Trainer, step: Callable[..., Tensor], change: Change) -> list[Tensor]:
    found = []
    for number in range(6):
        found.append(step(seeded("cpu", 8, 8, seed=number)).detach())
        if number == 2:
            change(trainer)
    return [*found, *everything(trainer.net, trainer.optimizer, "cpu")]


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_takes_effect(
    name: str, wrap: Callable[..., CompiledStep]
) -> None:
    change = CHANGES[name]
    plain = Trainer()
    expected = trained(plain, plain.step, change)
    trainer = Trainer()
    assert_identical(trained(trainer, wrap(trainer.step), change), expected)


def test_what_an_object_in_the_surroundings_has_takes_effect(
    wrap: Callable[..., CompiledStep],
) -> None:
    def made() -> tuple[Trainer, Callable[[Tensor], Tensor]]:
        trainer = Trainer()

        def step(x: Tensor) -> Tensor:
            loss = trainer.net(x).square().mean() * trainer.scale
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            return loss

        return trainer, step

    plain, step = made()
    expected = trained(plain, step, another_optimizer)
    other, step = made()
    assert_identical(trained(other, wrap(step), another_optimizer), expected)


@pytest.mark.parametrize("rates", [(0.1, 0, 1, 0.0, 1e-2), (1, 2, 0, 0.5)])
def test_rates_that_are_no_floats_take_effect(
    rates: tuple[float, ...], wrap: Callable[..., CompiledStep]
) -> None:
    def run(trainer: Trainer, step: Callable[..., Tensor]) -> list[Tensor]:
        for number, rate in enumerate(rates):
            trainer.optimizer.param_groups[0]["lr"] = rate
            step(seeded("cpu", 8, 8, seed=number))
        return everything(trainer.net, trainer.optimizer, "cpu")

    plain = Trainer("sgd")
    expected = run(plain, plain.step)
    other = Trainer("sgd")
    assert_identical(run(other, wrap(other.step)), expected)


class Counting(Trainer):
    def step(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().step(x)


class Remembering(Trainer):
    def step(self, x: Tensor) -> Tensor:
        loss = super().step(x)
        self.history.append(loss)
        return loss


@pytest.mark.parametrize(
    ("kind", "named"), [(Counting, "self.count"), (Remembering, "self.history")]
)
def test_what_a_step_changes_in_its_object_is_named(
    kind: type[Trainer], named: str, wrap: Callable[..., CompiledStep]
) -> None:
    with pytest.raises(UsageError, match=f"the step changes its variable '{named}'"):
        wrap(kind().step)(seeded("cpu", 8, 8))


class Called(Trainer):
    def __call__(self, x: Tensor) -> Tensor:
        def loss(y: Tensor) -> Tensor:
            return y.square().mean() * self.scale

        loss_ = loss(self.net(x))
        loss_.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss_


@pytest.mark.parametrize("is_bound", [False, True])
def test_what_an_object_that_is_called_has_takes_effect(
    is_bound: bool, wrap: Callable[..., CompiledStep]
) -> None:
    change = CHANGES["an attribute"]
    plain = Called()
    expected = trained(plain, plain, change)
    other = Called()
    assert_identical(trained(other, wrap(partial(other) if is_bound else other), change), expected)


class Arguments:
    """An argument that is no tensor."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_arguments_that_are_objects_take_effect(wrap: Callable[..., CompiledStep]) -> None:
    """Others may come at the same address, or the same with other contents."""

    def step(x: Tensor, own: object) -> Tensor:
        return x * (own.scale if isinstance(own, Arguments) else own)

    call, x, kept = wrap(step), seeded("cpu", 4, 4), Arguments(0.5)
    for number in range(6):
        kept.scale = number + 0.5
        for own in (Arguments(number), kept, np.float32(number), -0.0 if number % 2 else 0.0):
            assert_identical([call(x, own)], [step(x, own)])
        assert_identical([call(x, complex(number, 1))], [step(x, complex(number, 1))])


# --- what is another each time ------------------------------------------------------------------


def numbers() -> Iterator[Tensor]:
    while True:
        yield torch.ones(4)


BATCHES, OWN, ARRAYS = numbers(), random.Random(0), np.random.default_rng(0)
TAKEN: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "an iterator": (lambda x: x * next(BATCHES), "iterator as its variable 'BATCHES'"),
    "random": (lambda x: x * random.random(), r"Python's \(.*test_surroundings.py:\d+\)"),
    "a generator of Python's": (lambda x: x * OWN.gauss(), r"Python's \(.*test_surroundings.py"),
    "numpy.random": (lambda x: x * float(np.random.rand()), "from 'numpy.random'"),
    "a generator of NumPy's": (lambda x: x * float(ARRAYS.random()), "from 'ARRAYS'"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_step_that_takes_what_comes_next_is_refused(
    name: str, wrap: Callable[..., CompiledStep]
) -> None:
    step, named = TAKEN[name]
    with pytest.raises(UsageError, match=named):
        wrap(step)(torch.ones(4))


def shuffled() -> float:
    order = [1.0, 2.0, 3.0]
    random.shuffle(order)
    return order[0]


class Taking(nn.Module):
    """A layer whose forward pass takes from somewhere."""

    def __init__(self, take: Callable[[Taking], float], held: object = None) -> None:
        super().__init__()
        self.take, self.held = take, held

    def forward(self, x: Tensor) -> Tensor:
        return x * self.take(self)


class TakingFromBatches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * next(BATCHES)


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(ARRAYS.random())


TAKEN_BY_MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random, by a function": (lambda: Taking(lambda _: shuffled()), "test_surroundings.py"),
    "numpy": (lambda: Taking(lambda _: np.random.randn()), "from 'numpy.random'"),
    "an iterator": (
        lambda: Taking(lambda own: next(own.held), iter([1.0, 2.0, 3.0])),
        "module Taking has an iterator as its attribute 'held'",
    ),
    "its own of NumPy's": (
        lambda: Taking(lambda own: own.held.random(), np.random.default_rng(0)),
        "from 'Taking.held'",
    ),
    "a global iterator": (TakingFromBatches, "iterator as its variable 'BATCHES'"),
    "a global of NumPy's": (Drawing, "from 'ARRAYS'"),
}


@pytest.mark.parametrize("name", TAKEN_BY_MODULES)
def test_a_module_that_takes_what_comes_next_is_refused(
    name: str, wrap: Callable[..., CompiledStep]
) -> None:
    make, named = TAKEN_BY_MODULES[name]
    net = nn.Sequential(make())
    with pytest.raises(UsageError, match=named):
        wrap(lambda x: net(x).sum())(torch.ones(4))


def test_a_draw_is_told_of_though_the_step_goes_on(wrap: Callable[..., CompiledStep]) -> None:
    def step(x: Tensor) -> Tensor:
        try:
            return x * random.random()
        except Exception:  # noqa: BLE001 - what a careless script does
            return x

    with pytest.raises(UsageError, match="draws random numbers"):
        wrap(step)(torch.ones(4))


def test_draws_of_other_threads_and_of_iterators_made_inside_are_no_concern(
    wrap: Callable[..., CompiledStep],
) -> None:
    net = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()
        return net(x) * next(net.parameters()).sum()

    x = seeded("cpu", 2, 4)
    assert_identical([wrap(step)(x)], [step(x)])


# --- hooks that are put on later -----------------------------------------------------------------


def accumulating(trainer: Trainer) -> torch.autograd.graph.Node:
    """Return the node that adds to a gradient; its hooks last as long as somebody holds it."""
    trainer.node = torch.autograd.graph.get_gradient_edge(trainer.net[0].weight).node
    return trainer.node


def halve(gradient: Tensor) -> None:
    gradient.mul_(0.5)


def halved(gradients: tuple[Tensor, ...], *_: object) -> tuple[Tensor, ...]:
    return tuple(one * 0.5 for one in gradients)


def halve_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad.mul_(0.5)


HOOKS: dict[str, Callable[[Trainer], Any]] = {
    "all modules, before": lambda _: nn.modules.module.register_module_forward_pre_hook(
        lambda _, given: tuple(one * 0.5 for one in given)
    ),
    "all modules, after": lambda _: nn.modules.module.register_module_forward_hook(
        lambda _, __, made: made * 0.5
    ),
    "all modules, backward": lambda _: nn.modules.module.register_module_full_backward_hook(
        lambda _, given, __: tuple(None if one is None else one * 0.5 for one in given)
    ),
    "all modules, before backward": (
        lambda _: nn.modules.module.register_module_full_backward_pre_hook(
            lambda _, made: tuple(one * 0.5 for one in made)
        )
    ),
    "all optimizers, before": lambda _: register_optimizer_step_pre_hook(halve_gradients),
    "all optimizers, after": lambda _: register_optimizer_step_post_hook(halve_gradients),
    "a submodule, backward": lambda trainer: trainer.net[0].register_full_backward_hook(
        lambda _, given, __: tuple(None if one is None else one * 0.5 for one in given)
    ),
    "a parameter": lambda trainer: trainer.net[0].weight.register_hook(lambda one: one * 0.5),
    "a gradient added": (
        lambda trainer: trainer.net[0].weight.register_post_accumulate_grad_hook(
            lambda one: None if one.grad is None else halve(one.grad)
        )
    ),
    "a node, before": lambda trainer: accumulating(trainer).register_prehook(halved),
    "several parameters": lambda trainer: torch.autograd.graph.register_multi_grad_hook(
        list(trainer.net.parameters()),
        lambda found: [one.mul_(0.5) for one in found if one is not None],
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_are_put_on_after_a_capture_take_effect(
    name: str, wrap: Callable[..., CompiledStep]
) -> None:
    def train(compile_: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
        trainer = Trainer()
        call, found, hook = compile_(trainer.step), [], None
        for number in range(6):
            found.append(call(seeded("cpu", 8, 8, seed=number)).detach())
            if number == 2:
                hook = HOOKS[name](trainer)
            elif number == 4:
                hook.remove()
        return [*found, *everything(trainer.net, trainer.optimizer, "cpu")]

    assert_identical(train(wrap), train(lambda step: step))


def test_a_generator_that_a_step_does_not_draw_from_may_be_its_variable(
    wrap: Callable[..., CompiledStep],
) -> None:
    def step(x: Tensor, is_random: bool) -> Tensor:
        return x * random.random() if is_random else np.float32(2) * x

    call = wrap(step)
    for number in range(3):
        random.seed(number)
        assert_identical([call(torch.ones(4), False)], [torch.full((4,), 2.0)])
    assert len(call.captures()) == 1


def test_a_large_array_as_an_argument_is_refused(wrap: Callable[..., CompiledStep]) -> None:
    call = wrap(lambda x, own: x * torch.from_numpy(own)[:4])
    with pytest.raises(UsageError, match=r"pass torch\.from_numpy"):
        call(torch.ones(4), np.ones(1 << 16))


# --- memory that is shared ----------------------------------------------------------------------


def one_and_two(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x, x), (x, y), (y, x), (y, y), (x, y)]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_capture_is_for_arguments_that_are_one_as_they_were(
    is_written: bool, wrap: Callable[..., CompiledStep]
) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        if is_written:
            y.add_(1)
        return (x * 2 - y).exp()

    call = wrap(step)
    for pair, expected in zip(
        one_and_two(*(seeded("cpu", 4, 4, seed=n) for n in (1, 2))),
        one_and_two(*(seeded("cpu", 4, 4, seed=n) for n in (1, 2))),
        strict=True,
    ):
        assert_identical([call(*pair), *pair], [step(*expected), *expected])


def test_memory_that_only_later_arguments_share_is_not_taken_for_theirs(
    wrap: Callable[..., CompiledStep],
) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x * 2

    call = wrap(step)
    call(seeded("cpu", 4, 4), seeded("cpu", 4, 4))
    both, expected = seeded("cpu", 5, 4), seeded("cpu", 5, 4)
    made = call(both[1:], both[:-1])
    assert_identical([made, both], [step(expected[1:], expected[:-1]), expected])


def test_an_argument_may_be_what_the_step_uses_besides(wrap: Callable[..., CompiledStep]) -> None:
    net = nn.Module()
    net.register_buffer("mean", seeded("cpu", 4))
    kept = seeded("cpu", 4, seed=2)

    def step(x: Tensor) -> Tensor:
        return x * 2 + net.mean - kept

    call = wrap(step)
    for x in (net.mean, kept, seeded("cpu", 4, seed=3), kept, net.mean):
        assert_identical([call(x)], [step(x)])


def test_what_was_computed_before_the_step_is_refused(wrap: Callable[..., CompiledStep]) -> None:
    """Its backward pass would go on into what the step has not recorded, and leave fakes there."""
    encoder, net = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().sum()
        loss.backward()
        return loss

    call = wrap(step)
    with pytest.raises(UsageError, match=r"computed before it.*pass tensor.detach"):
        call(encoder(torch.ones(2, 4)))
    outer = encoder.weight.tanh()
    with pytest.raises(UsageError, match="computed before it"):
        wrap(lambda x: step(x @ outer))(torch.ones(2, 4))
    assert encoder.weight.grad is None
    assert net.weight.grad is None
    call(encoder(torch.ones(2, 4)).detach())


# --- what modules have --------------------------------------------------------------------------


class Module(nn.Module):
    """A layer that looks at other things than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.weights = nn.ParameterList([torch.ones(4)])
        self.register_buffer("mean", None)
        self.act = torch.tanh
        self.shift = torch.zeros(4)
        self.order = (0, 1)
        self.longest = 0
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[0])
        for number in self.order:
            x = self.act(self.layers[number](x)) * self.weights[0] + self.shift
        self.mean = x.detach().mean(0) if self.mean is None else self.mean * 0.9
        return x * self.longest - self.mean


CHANGES_OF_MODULES: dict[str, Callable[[Module], object]] = {
    "nothing": lambda net: None,
    "a layer in a list": lambda net: net.layers.__setitem__(1, nn.Linear(4, 4)),
    "a parameter in a list": lambda net: net.weights.__setitem__(0, torch.ones(4) * 2),
    "a buffer that is none again": lambda net: setattr(net, "mean", None),
    "a function": lambda net: setattr(net, "act", torch.sigmoid),
    "a tensor": lambda net: setattr(net, "shift", torch.ones(4)),
    "a tuple": lambda net: setattr(net, "order", (1, 1, 0)),
}


@pytest.mark.parametrize(
    ("name", "is_called"),
    [*((name, True) for name in CHANGES_OF_MODULES), ("a function", False), ("a tuple", False)],
)
def test_what_changes_in_a_module_takes_effect(
    name: str, is_called: bool, wrap: Callable[..., CompiledStep]
) -> None:
    def train(compile_: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
        net = Module()

        def step(x: Tensor) -> Tensor:
            loss = (net(x) if is_called else net.forward(x)).square().sum()
            loss.backward()
            net.zero_grad()
            return loss

        call = compile_(step)
        found = []
        for number, rows in enumerate((3, 3, 2, 3, 5, 5, 2, 3)):
            found.append(call(seeded("cpu", rows, 4, seed=number)).detach())
            if number == 3:
                torch.manual_seed(9)
                CHANGES_OF_MODULES[name](net)
        return [*found, net.mean, torch.tensor(net.longest)]

    assert_identical(train(wrap), train(lambda step: step))


@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_step_may_change_the_modes_of_modules(
    is_put_back: bool, wrap: Callable[..., CompiledStep]
) -> None:
    def run(compile_: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
        trainer = Trainer()
        net = trainer.net = nn.Sequential(trainer.net, nn.Dropout(0.5))

        def step(x: Tensor) -> Tensor:
            is_training = net[1].training
            trainer.step(x)
            net.eval()
            loss = net(x).mean()
            net[1].train(is_put_back)
            return loss + is_training

        call, found = compile_(step), []
        for number in range(6):
            found.append(call(seeded("cpu", 8, 8, seed=number)).detach())
            found.append(torch.tensor([one.training for one in net.modules()]))
            if number == 3:
                net.train()
        return [*found, *everything(net, trainer.optimizer, "cpu")]

    assert_identical(run(wrap), run(lambda step: step))


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_model_in_a_step_has_the_modes_of_what_it_wraps(
    wrap: Callable[..., CompiledStep],
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inner = torch.compile(net, backend="eager")
    x = seeded("cpu", 2, 4)
    assert_identical([wrap(lambda x: inner(x).sum())(x)], [net(x).sum()])


def test_a_step_that_freezes_for_good_is_refused(wrap: Callable[..., CompiledStep]) -> None:
    trainer = Trainer()

    def step(x: Tensor, is_for_good: bool) -> None:
        trainer.net[0].requires_grad_(False)
        trainer.step(x)
        trainer.net[0].requires_grad_(not is_for_good)

    call = wrap(step)
    with pytest.raises(UsageError, match=r"call requires_grad_\(\) after the step"):
        call(seeded("cpu", 8, 8), True)
    assert all(one.requires_grad for one in trainer.net.parameters())
    call(seeded("cpu", 8, 8), False)
    assert all(one.requires_grad for one in trainer.net.parameters())


def test_what_a_module_counts_is_named(wrap: Callable[..., CompiledStep]) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    net = Counting(4, 4)
    call = wrap(net)
    x = torch.ones(2, 4)
    call(x)
    assert net.calls == 1
    with pytest.raises(UsageError, match=r"Counting.calls again and again, now to 2"):
        call(x)
    assert net.calls == 1


def test_what_a_step_puts_into_a_module_s_list_is_named(
    wrap: Callable[..., CompiledStep],
) -> None:
    class Listing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(self.what(x))
            return super().forward(x)

    for what, named in ((len, "changes what Listing.seen holds"), (torch.relu, "puts a tensor")):
        net = Listing(4, 4)
        net.seen, net.what = [], what
        with pytest.raises(UsageError, match=named):
            wrap(lambda x, net=net: net(x))(torch.ones(2, 4))
        assert net.seen == []


def test_what_an_optimizer_counts_is_named(wrap: Callable[..., CompiledStep]) -> None:
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self) -> None:
            self.calls += 1
            super().step()

    net = nn.Linear(4, 4)
    optimizer = Counting(net.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(UsageError, match=r"counts in Python \('calls' became 1\)"):
        wrap(step)(torch.ones(2, 4))
    assert optimizer.calls == 0


class Own(torch.optim.Optimizer):
    """An optimizer of a user's, with things besides the state of parameters."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.scale = 1.0
        self.param_groups[0]["factors"] = [1.0]
        self.sums = [torch.zeros_like(one) for one in self.param_groups[0]["params"]]
        self.seen: list[Tensor] = []
        self.is_rebinding = self.is_keeping = False

    @torch.no_grad()
    def step(self) -> None:
        shared = self.state["shared"]
        if "norm" not in shared:
            shared["norm"] = torch.ones(())
        group = self.param_groups[0]
        for number, one in enumerate(group["params"]):
            shared["norm"].mul_(0.9).add_(one.grad.norm())
            if self.is_keeping:
                self.seen.append(one.grad)
            if self.is_rebinding:
                self.sums[number] = self.sums[number] + one.grad
            else:
                self.sums[number].add_(one.grad)
            one.addcdiv_(self.sums[number], shared["norm"], value=-0.01 * self.scale)
            one.sub_(one.grad * group["factors"][0] * group["lr"])


def doubled(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for one in optimizer.param_groups[0]["params"]:
        one.grad.mul_(2)


CHANGES_OF_OPTIMIZERS: dict[str, Callable[[Own], object]] = {
    "nothing": lambda own: None,
    "an attribute": lambda own: setattr(own, "scale", 3.0),
    "a list in a group": lambda own: own.param_groups[0]["factors"].__setitem__(0, 0.5),
    "a list of tensors": lambda own: own.sums.__setitem__(0, torch.ones_like(own.sums[0])),
    "what belongs to no parameter": lambda own: own.state["shared"].clear(),
    "a hook": lambda own: own.register_step_pre_hook(doubled),
    "its step": lambda own: setattr(own, "step", lambda: None),
}


@pytest.mark.parametrize("name", CHANGES_OF_OPTIMIZERS)
def test_what_changes_in_an_optimizer_takes_effect(
    name: str, wrap: Callable[..., CompiledStep]
) -> None:
    def run(compile_: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
        trainer = Trainer()
        trainer.optimizer = own = Own(trainer.net.parameters())
        change = CHANGES_OF_OPTIMIZERS[name]
        found = trained(trainer, compile_(trainer.step), lambda _: change(own))
        return [*found, own.state["shared"]["norm"], *own.sums]

    assert_identical(run(wrap), run(lambda step: step))


@pytest.mark.parametrize(("flag", "named"), [("is_rebinding", "sums"), ("is_keeping", "seen")])
def test_a_list_that_an_optimizer_changes_is_named_and_as_it_was(
    flag: str, named: str, wrap: Callable[..., CompiledStep]
) -> None:
    trainer = Trainer()
    trainer.optimizer = own = Own(trainer.net.parameters())
    trainer.step(seeded("cpu", 8, 8))
    before = list(own.sums)
    setattr(own, flag, True)
    with pytest.raises(UsageError, match=rf"counts in Python \('{named}' became "):
        wrap(trainer.step)(seeded("cpu", 8, 8))
    assert all(one is other for one, other in zip(own.sums, before, strict=True))
    assert own.seen == []


def test_sums_of_gradients_may_be_fused(wrap: Callable[..., CompiledStep]) -> None:
    """SGD and Adagrad note that they have looked at types, which is no count."""

    def run(
        kind: type[torch.optim.Optimizer], compile_: Callable[..., Callable[..., Tensor]]
    ) -> list[Tensor]:
        trainer = Trainer()
        trainer.optimizer = kind(trainer.net.parameters(), lr=0.1, fused=True)
        return trained(trainer, compile_(trainer.step), lambda _: None)

    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        assert_identical(run(kind, wrap), run(kind, lambda step: step))


# --- settings of PyTorch ------------------------------------------------------------------------


def test_attention_is_run_by_the_kernel_that_is_asked_for(
    wrap: Callable[..., CompiledStep],
) -> None:
    def step(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    call = wrap(step)
    x = seeded("cpu", 2, 4, 64, 16)
    for _ in range(2):
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend):
                assert_identical([call(x)], [step(x)])


def test_casts_of_weights_are_kept_or_not_as_autocast_is_told(
    wrap: Callable[..., CompiledStep],
) -> None:
    """A weight that is used twice has its gradients added up in bfloat16 where its cast is kept."""

    def run(compile_: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
        trainer = Trainer()

        def step(x: Tensor) -> None:
            loss = trainer.net(x).float().square().mean() + trainer.net(x * 2).float().abs().mean()
            loss.backward()
            trainer.optimizer.step()

        call = compile_(step)
        for number in range(6):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=number % 2 == 0):
                call(seeded("cpu", 8, 8, seed=number))
        return everything(trainer.net, trainer.optimizer, "cpu")

    assert_identical(run(wrap), run(lambda step: step))


def test_a_step_within_hooks_is_refused_whether_captured_before_or_not(
    wrap: Callable[..., CompiledStep],
) -> None:
    call = wrap(Trainer().step)
    x = seeded("cpu", 8, 8)
    for _ in range(3):
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda one: one * 2, lambda one: one),
            pytest.raises(UsageError, match="saved tensors are handed to hooks"),
        ):
            call(x)
        call(x)


def test_a_step_may_run_in_inference_mode(
    wrap: Callable[..., CompiledStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such tensors have no versions, by which what leaves is known to be unchanged."""
    free = replace(CPU, link=1e-15, codec=1e-18, graph_store=0.0, thread_recompute=1.0)
    monkeypatch.setattr(partition, "machine_of", lambda _: free)
    net = Trainer().net

    def step(x: Tensor) -> Tensor:
        return net(x).exp().square().mean()

    call = wrap(step, budget=0.0)
    with torch.inference_mode():
        for _ in range(2):
            assert_identical([call(seeded("cpu", 8, 8))], [step(seeded("cpu", 8, 8))])
    assert call.stats().skipped["inference"] > 0
