"""What a captured step reads besides its arguments: a change takes effect, or is refused."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
from torch.overrides import TorchFunctionMode

Wrap = Callable[..., CompiledStep]


class Trainer:
    """What many scripts have: an object with a model, an optimizer and settings."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
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
    "nothing": lambda _: None,
    "a state that was": a_state_that_was,
    "no state": lambda trainer: trainer.optimizer.state.clear(),
    "an attribute": lambda trainer: setattr(trainer, "scale", 3.0),
    "a table": lambda trainer: trainer.settings.update(power=3.0),
    "a list": lambda trainer: trainer.weights.__setitem__(0, 2.0),
    "a module's hook": lambda trainer: trainer.net[0].register_forward_hook(lambda *a: a[-1] * 2),
    "a parameter's hook": lambda trainer: trainer.net[0].weight.register_hook(lambda g: g * 2),
    "another optimizer": another_optimizer,
    "another model": another_model,
    "assigned parameters": assigned_parameters,
}


class Pair:
    """Two equal trainers, one of whose steps is compiled, that do the same one after the other."""

    def __init__(
        self,
        wrap: Wrap,
        make: Callable[[], Trainer] = Trainer,
        step_of: Callable[[Trainer], Callable[..., Tensor]] = lambda trainer: trainer.step,
    ) -> None:
        self.plain, self.other = make(), make()
        self.step = step_of(self.plain)
        self.call = wrap(step_of(self.other))

    def assert_alike(self, after: str) -> None:
        """Make two steps with each, and compare losses and all that they change."""
        for seed in (1, 2):
            x = seeded("cpu", 8, 8, seed=seed)
            assert_identical([self.call(x)], [self.step(x)])
        found, expected = (
            everything(one.net, one.optimizer, "cpu")[:-2] for one in (self.other, self.plain)
        )
        assert_identical(found, expected)


def test_what_changes_between_steps_takes_effect(wrap: Wrap) -> None:
    pair = Pair(wrap)
    for name, change in CHANGES.items():
        change(pair.plain)
        change(pair.other)
        pair.assert_alike(name)


class Called(Trainer):
    """What is called itself."""

    def __call__(self, x: Tensor) -> Tensor:
        def loss(y: Tensor) -> Tensor:
            return y.square().mean() * self.scale

        loss_ = loss(self.net(x))
        loss_.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss_


def around(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    """Return a function that has a trainer as its variable."""

    def step(x: Tensor) -> Tensor:
        loss = trainer.net(x).square().mean() * trainer.scale
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("step_of", [lambda own: own, partial, around])
def test_what_changes_in_an_object_that_a_step_has_takes_effect(
    step_of: Callable[[Trainer], Callable[..., Tensor]], wrap: Wrap
) -> None:
    pair = Pair(wrap, Called, step_of)
    for name in ("nothing", "an attribute", "another optimizer"):
        CHANGES[name](pair.plain)
        CHANGES[name](pair.other)
        pair.assert_alike(name)


def test_rates_that_are_no_floats_take_effect(wrap: Wrap) -> None:
    pair = Pair(wrap)
    for rate in (1, 2, 0, 0.5, 0, 1, 0.0, 1e-2):
        for one in (pair.plain, pair.other):
            one.optimizer.param_groups[0]["lr"] = rate
        pair.assert_alike(f"a rate of {rate}")


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
    kind: type[Trainer], named: str, wrap: Wrap
) -> None:
    with pytest.raises(UsageError, match=f"the step changes its variable '{named}'"):
        wrap(kind().step)(seeded("cpu", 8, 8))
    calls = 0

    def counting(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * 2

    with pytest.raises(UsageError, match="'calls'"):
        wrap(counting)(seeded("cpu", 4))


class Arguments:
    """An argument that is no tensor."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_arguments_that_are_objects_take_effect(wrap: Wrap) -> None:
    """Others may come at the same address, or the same with other contents."""

    def step(x: Tensor, own: object) -> Tensor:
        return x * (own.scale if isinstance(own, Arguments) else own)

    call, x, kept = wrap(step), seeded("cpu", 4, 4), Arguments(0.5)
    for number in range(3):
        kept.scale = number + 0.5
        for own in (Arguments(number), kept, np.float32(number), -0.0 if number % 2 else 0.0):
            assert_identical([call(x, own)], [step(x, own)])
        assert_identical([call(x, complex(number, 1))], [step(x, complex(number, 1))])


# --- what is another each time ------------------------------------------------------------------


def numbers() -> Iterator[Tensor]:
    while True:
        yield torch.ones(4)


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


class OfClass(nn.Module):
    shared = np.random.default_rng(0)
    others = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shared.random()

    def loss(self, x: Tensor) -> Tensor:
        return x * self.others.random()

    @property
    def batch(self) -> Tensor:
        return next(BATCHES)


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(ARRAYS.random())


class Holder:
    """An object with an attribute."""

    def __init__(self, held: object) -> None:
        self.held: Any = held


BATCHES, OWN, ARRAYS = numbers(), random.Random(0), np.random.default_rng(0)
TABLE = {"rng": np.random.default_rng(0), "deep": {"rng": [np.random.RandomState(0)]}}
ITERATORS = [itertools.count(1)]
PAIR, QUEUE, SET = (0, iter([1.0])), deque([[iter([1.0])]]), {iter([1.0])}
NEXT, TAKE, LOOK_UP = itertools.count(1).__next__, partial(next, iter([1.0])), TABLE.get
OBJECT = Holder(Holder(iter([1.0])))
BITS, SPAWNING = np.random.PCG64(0), np.random.default_rng(0)
HOLDING = Taking(lambda _: 1.0, np.random.default_rng(0))
PARENT = nn.Sequential(Taking(lambda _: 1.0, {"rng": np.random.default_rng(0)}))
NETS = {"a": Taking(lambda _: 1.0, np.random.default_rng(0))}
CLASSES = {"a": [OfClass()]}
UNCALLED = Taking(lambda _: 1.0, [iter([1.0])])
IN_CONTAINERS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "dict": (lambda x: x * float(TABLE["rng"].random()), r"from \"TABLE\['rng'\]\""),
    "nested": (lambda x: x * TABLE["deep"]["rng"][0].rand(), r"TABLE\['deep'\]\['rng'\]\[0\]"),
    "list": (lambda x: x * next(ITERATORS[0]), r"variable 'ITERATORS\[0\]'"),
    "tuple": (lambda x: x * next(PAIR[1]), r"variable 'PAIR\[1\]'"),
    "deque": (lambda x: x * next(QUEUE[0][0]), r"variable 'QUEUE\[0\]\[0\]'"),
    "set": (lambda x: x * next(next(one for one in SET)), r"variable 'SET\[0\]'"),
    "the method of an iterator": (lambda x: x * NEXT(), "variable 'NEXT'"),
    "the method of a dict": (lambda x: x * LOOK_UP("rng").random(), r"LOOK_UP\['rng'\]"),
    "a partial": (lambda x: x * TAKE(), "variable 'TAKE'"),
    "an object's object": (lambda x: x * next(OBJECT.held.held), r"variable 'OBJECT.held.held'"),
    "bits": (lambda x: x * (BITS.random_raw() % 7), "from 'BITS'"),
    "spawning": (lambda x: x * SPAWNING.spawn(1)[0].random(), "from 'SPAWNING'"),
    "a module before its call": (
        lambda x: HOLDING(x * float(HOLDING.held.random())),
        "from 'Taking.held'",
    ),
    "a submodule before its call": (
        lambda x: PARENT(x * float(PARENT[0].held["rng"].random())),
        r"from \"Taking.held\['rng'\]\"",
    ),
    "a module in a dict": (
        lambda x: NETS["a"](x * float(NETS["a"].held.random())),
        "from 'Taking.held'",
    ),
    "a module that is not called": (
        lambda x: x * next(UNCALLED.held[0]),
        r"module Taking has an iterator as its attribute 'held\[0\]'",
    ),
    "a module, of a dict": (
        Taking(lambda own: own.held["rng"].random(), {"rng": np.random.default_rng(0)}),
        r"from \"Taking.held\['rng'\]\"",
    ),
    "a module, of a list": (
        Taking(lambda own: next(own.held[0]), [iter([1.0])]),
        r"module Taking has an iterator as its attribute 'held\[0\]'",
    ),
    "a module, of its class": (OfClass(), "from 'OfClass.shared'"),
    "a module, by another method": (
        lambda x: CLASSES["a"][0].loss(x) * 2,
        "from 'OfClass.others'",
    ),
    "a module, by a property": (
        lambda x: x * CLASSES["a"][0].batch,
        "iterator as its variable 'BATCHES'",
    ),
}
TAKEN: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "an iterator": (lambda x: x * next(BATCHES), "iterator as its variable 'BATCHES'"),
    "random": (lambda x: x * random.random(), r"Python's \(.*test_surroundings.py:\d+\)"),
    "a generator of Python's": (lambda x: x * OWN.gauss(), r"Python's \(.*test_surroundings.py"),
    "numpy.random": (lambda x: x * float(np.random.rand()), "from 'numpy.random'"),
    "a generator of NumPy's": (lambda x: x * float(ARRAYS.random()), "from 'ARRAYS'"),
    "a module, by a function": (Taking(lambda _: shuffled()), "test_surroundings.py"),
    "a module, of NumPy": (Taking(lambda _: np.random.randn()), "from 'numpy.random'"),
    "a module, of its iterator": (
        Taking(lambda own: next(own.held), iter([1.0, 2.0, 3.0])),
        "module Taking has an iterator as its attribute 'held'",
    ),
    "a module, of its own of NumPy's": (
        Taking(lambda own: own.held.random(), np.random.default_rng(0)),
        "from 'Taking.held'",
    ),
    "a module, of a global iterator": (TakingFromBatches(), "iterator as its variable 'BATCHES'"),
    "a module, of a global of NumPy's": (Drawing(), "from 'ARRAYS'"),
    **IN_CONTAINERS,
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_step_that_takes_what_comes_next_is_refused(name: str, wrap: Wrap) -> None:
    step, named = TAKEN[name]
    if isinstance(step, nn.Module):
        net = nn.Sequential(step)
        step = lambda x: net(x).sum()  # noqa: E731 - as the others
    with pytest.raises(UsageError, match=named):
        wrap(step)(torch.ones(4))


def test_what_a_step_does_not_take_from_may_be_within_reach(wrap: Wrap) -> None:
    """Generators may be anywhere; iterators in attributes that neither code nor a call reads."""
    net, trainer = nn.Linear(4, 4), Holder(iter([1.0]))
    net.held, trainer.scale = {"rng": np.random.default_rng(0)}, 2.0
    uncalled = Taking(lambda _: 1.0, iter([1.0]))

    def step(x: Tensor) -> Tensor:
        uncalled.requires_grad_(False)
        return net(x) * trainer.scale * len(TABLE)

    x = seeded("cpu", 2, 4)
    assert_identical([wrap(step)(x)], [step(x)])


def test_a_draw_is_told_of_though_the_step_goes_on(wrap: Wrap) -> None:
    def step(x: Tensor) -> Tensor:
        try:
            return x * random.random()
        except Exception:  # noqa: BLE001 - what a careless script does
            return x

    with pytest.raises(UsageError, match="draws random numbers"):
        wrap(step)(torch.ones(4))


def test_draws_of_other_threads_and_of_iterators_made_inside_are_no_concern(wrap: Wrap) -> None:
    net = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()
        return net(x) * next(net.parameters()).sum()

    x = seeded("cpu", 2, 4)
    assert_identical([wrap(step)(x)], [step(x)])


def test_draws_of_a_feeder_are_no_concern(wrap: Wrap) -> None:
    """Of an iterable that augments with NumPy, and has its next item made beside each step."""
    net, known, begun = nn.Linear(4, 4), np.random.default_rng(0), threading.Event()

    def batches() -> Iterator[Tensor]:
        for number in range(6):
            begun.set()
            np.random.rand(4)
            known.random(4)
            yield seeded("cpu", 2, 4, seed=number)

    def step(x: Tensor, is_drawing: bool = False) -> Tensor:
        return net(x) * (np.random.rand() if is_drawing else 1) * len([known])

    with storm.Feeder(batches(), ahead=1) as feeder:
        items = iter(feeder)
        for number in range(6):
            begun.clear()  # before an item is taken, as the thread then begins another
            x = next(items)
            if number % 2:
                with pytest.raises(UsageError, match=r"from 'numpy.random'"):
                    wrap(step)(x, True)
            else:
                assert_identical([wrap(step)(x)], [step(x)])
            assert number > 2 or begun.wait(60)


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
    for one in optimizer.param_groups[0]["params"]:
        one.grad.mul_(0.5)


@torch.no_grad()
def halve_weights(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for one in optimizer.param_groups[0]["params"]:
        one.mul_(0.5)


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
    "all optimizers, after": lambda _: register_optimizer_step_post_hook(halve_weights),
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


def test_hooks_that_are_put_on_after_a_capture_take_effect(wrap: Wrap) -> None:
    pair = Pair(wrap)
    pair.assert_alike("no hook")
    for name, put_on in HOOKS.items():
        hooks = [put_on(one) for one in (pair.plain, pair.other)]  # both of what all have
        try:
            pair.assert_alike(name)
        finally:
            for hook in hooks:
                hook.remove()
        pair.assert_alike(f"{name}, removed")


def test_a_generator_that_a_step_does_not_draw_from_may_be_its_variable(wrap: Wrap) -> None:
    def step(x: Tensor, is_random: bool) -> Tensor:
        return x * random.random() if is_random else np.float32(2) * x

    call = wrap(step)
    for number in range(3):
        random.seed(number)
        assert_identical([call(torch.ones(4), False)], [torch.full((4,), 2.0)])
    assert len(call.captures()) == 1


def test_a_large_array_as_an_argument_is_refused(wrap: Wrap) -> None:
    call = wrap(lambda x, own: x * torch.from_numpy(own)[:4])
    with pytest.raises(UsageError, match=r"pass torch\.from_numpy"):
        call(torch.ones(4), np.ones(1 << 16))


# --- memory that is shared ----------------------------------------------------------------------


def one_and_two(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x, x), (x, y), (y, x), (y, y), (x, y)]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_capture_is_for_arguments_that_are_one_as_they_were(is_written: bool, wrap: Wrap) -> None:
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


def test_memory_that_only_later_arguments_share_is_not_taken_for_theirs(wrap: Wrap) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x * 2

    call = wrap(step)
    call(seeded("cpu", 4, 4), seeded("cpu", 4, 4))
    both, expected = seeded("cpu", 5, 4), seeded("cpu", 5, 4)
    made = call(both[1:], both[:-1])
    assert_identical([made, both], [step(expected[1:], expected[:-1]), expected])


def test_an_argument_may_be_what_the_step_uses_besides(wrap: Wrap) -> None:
    net = nn.Module()
    net.register_buffer("mean", seeded("cpu", 4))
    kept = seeded("cpu", 4, seed=2)

    def step(x: Tensor) -> Tensor:
        return x * 2 + net.mean - kept

    call = wrap(step)
    for x in (net.mean, kept, seeded("cpu", 4, seed=3), kept, net.mean):
        assert_identical([call(x)], [step(x)])


def test_what_was_computed_before_the_step_is_refused(wrap: Wrap) -> None:
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
        return self.made(x)

    def made(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[0])
        for number in self.order:
            x = self.act(self.layers[number](x)) * self.weights[0] + self.shift
        self.mean = x.detach().mean(0) if self.mean is None else self.mean * 0.9
        return x * self.longest - self.mean


CHANGES_OF_MODULES: dict[str, Callable[[Module], object]] = {
    "a layer in a list": lambda net: net.layers.__setitem__(1, nn.Linear(4, 4)),
    "a parameter in a list": lambda net: net.weights.__setitem__(0, torch.ones(4) * 2),
    "a buffer that is none again": lambda net: setattr(net, "mean", None),
    "a function": lambda net: setattr(net, "act", torch.sigmoid),
    "a tensor": lambda net: setattr(net, "shift", torch.ones(4)),
    "a tuple": lambda net: setattr(net, "order", (1, 1, 0)),
}


WAYS: dict[str, Callable[[Holder, Tensor], Tensor]] = {
    "a call": lambda holder, x: holder.held["net"](x),
    "its forward": lambda holder, x: holder.held["net"].forward(x),
    "another method": lambda holder, x: holder.held["net"].made(x),
    "a method of its class": lambda holder, x: Module.made(holder.held["net"], x),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_changes_in_a_module_takes_effect(way: str, wrap: Wrap) -> None:
    """However the step reaches the module, and whatever it does with it."""

    def step_of(net: Module) -> Callable[[Tensor], Tensor]:
        holder = Holder({"net": net})

        def step(x: Tensor) -> Tensor:
            loss = WAYS[way](holder, x).square().sum()
            loss.backward()
            return loss

        return step

    def assert_alike(rows: int, after: str) -> None:
        x = seeded("cpu", rows, 4, seed=rows)
        found = [call(x), other.mean, torch.tensor(other.longest)]
        assert_identical(found, [step(x), plain.mean, torch.tensor(plain.longest)])
        gradients = [[one.grad for one in net.parameters()] for net in (other, plain)]
        assert_identical(*gradients)

    plain, other = Module(), Module()
    step, call = step_of(plain), wrap(step_of(other))
    for rows in (3, 3, 2, 3, 5):
        assert_alike(rows, "nothing")
    for name, change in CHANGES_OF_MODULES.items():
        for net in (plain, other):
            torch.manual_seed(9)
            change(net)
        for _ in range(2):
            assert_alike(5, name)


def test_an_attribute_that_a_step_only_reads_takes_effect(wrap: Wrap) -> None:
    """Of a module and of an optimizer, which a function that the step calls finds in an object."""
    net, trainer = Module(), Trainer()
    holder = Holder([[net, trainer.optimizer]])

    def factor() -> Any:
        found, optimizer = holder.held[0]
        return found.longest * optimizer.param_groups[0]["lr"]

    call, x = wrap(lambda x: x * factor()), torch.ones(4)
    for number in range(4):
        net.longest = 1 + number // 2
        trainer.optimizer.param_groups[0]["lr"] = 0.1 * number
        assert_identical([call(x)], [x * factor()])


class Tuned(Module):
    """A layer with an optimizer, whose step looks at more of tensors than what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.tuned = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        self.tuned.scales = Holder({"all": {"weight": 1.0}})  # type: ignore[attr-defined]
        self.spare = nn.Linear(2, 2).requires_grad_(False)  # used in no forward pass
        self.layers[0].weight.rate = 1.0  # type: ignore[union-attr]
        self.many = [1.0] * 100
        self.stars = [torch.ones(()) for _ in range(100)]
        self.rates = dict.fromkeys(self.layers.parameters(), 1.0)

    def step(self, x: Tensor) -> Tensor:
        loss = self(x).square().sum() * self.many[7] * self.stars[7]
        loss = loss + sum(one.square().sum() for one in self.spare.parameters() if asks(one))
        loss.backward()
        for one in self.layers.parameters():
            assert one.grad is not None
            one.grad.mul_(getattr(one, "rate", 1.0) * self.rates[one])
            one.grad.mul_(self.tuned.scales.held["all"]["weight"])  # type: ignore[attr-defined]
        self.tuned.step()
        self.tuned.zero_grad()
        return loss


def asks(parameter: Tensor) -> bool:
    return parameter.requires_grad or parameter.dtype == torch.float64


CHANGES_BESIDES: dict[str, Callable[[Tuned], object]] = {
    "nothing": lambda net: None,
    "an attribute of a parameter": lambda net: setattr(net.layers[0].weight, "rate", 0.5),
    "a new attribute": lambda net: setattr(net.layers[1].weight, "rate", 0.5),
    "an item of many": lambda net: net.many.__setitem__(7, 2.0),
    "a tensor of many": lambda net: net.stars.__setitem__(7, torch.tensor(3.0)),
    "what belongs to a parameter": lambda net: net.rates.update({net.layers[0].bias: 0.5}),  # type: ignore[dict-item]
    "deep in an optimizer": lambda net: net.tuned.scales.held["all"].update(weight=0.5),  # type: ignore[attr-defined]
    "another type": lambda net: net.spare.double(),
    "no longer frozen": lambda net: net.spare.float().requires_grad_(True),
}


def test_what_tensors_have_besides_their_contents_takes_effect(wrap: Wrap) -> None:
    plain, other = Tuned(), Tuned()
    other.spare.load_state_dict(plain.spare.state_dict())
    call, x = wrap(other.step), seeded("cpu", 3, 4)
    for change in CHANGES_BESIDES.values():
        change(plain)
        change(other)
        for _ in range(3):
            found, expected = call(x), plain.step(x)
            assert_identical([found, *other.parameters()], [expected, *plain.parameters()])


def test_an_attribute_of_an_argument_takes_effect(wrap: Wrap) -> None:
    call = wrap(lambda x: x * x.rate)
    for rate in (1.0, 1.0, 1.0, 2.0):
        x = torch.ones(2)
        x.rate = rate  # type: ignore[attr-defined]
        assert_identical([call(x)], [x * rate])


def test_what_a_step_sets_in_a_parameter_is_refused(wrap: Wrap) -> None:
    net = nn.Linear(4, 4)
    net.weight.count = 0  # type: ignore[attr-defined]

    def step(x: Tensor) -> Tensor:
        net.weight.count += 1  # type: ignore[attr-defined]
        return net(x)  # type: ignore[no-any-return]

    with pytest.raises(UsageError, match="changes an attribute of a parameter of Linear"):
        wrap(step)(torch.ones(2, 4))

    def put(x: Tensor) -> Tensor:
        net.weight.average = net(x).mean()  # type: ignore[attr-defined]
        return x * 2

    with pytest.raises(UsageError, match="changes an attribute of a parameter of Linear"):
        wrap(put)(torch.ones(2, 4))
    assert not hasattr(net.weight, "average")


def test_a_search_for_nan_that_begins_later_is_refused(wrap: Wrap) -> None:
    trainer = Trainer()
    call, x = wrap(trainer.step), seeded("cpu", 8, 8)
    for _ in range(3):
        call(x)
    with pytest.raises(UsageError, match="check_nan=False"), torch.autograd.detect_anomaly():
        call(x)
    with torch.autograd.detect_anomaly(check_nan=False):
        call(x)


def test_parametrized_weights_that_are_cached_outside_are_refused(wrap: Wrap) -> None:
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    call, x = wrap(lambda x: net(net(x))), seeded("cpu", 2, 4)
    for _ in range(3):
        call(x)
    with nn.utils.parametrize.cached():
        with pytest.raises(UsageError, match=r"leaves what it computes in .*cached\["):
            call(x)
        net(x)  # of the capture, nothing is left in the cache


def test_modules_that_a_step_makes_are_its_own(wrap: Wrap) -> None:
    target = torch.ones(2, 4)
    made = nn.MSELoss()

    def step(x: Tensor) -> Tensor:
        loss, copied = nn.MSELoss(), copy.deepcopy(made)
        loss.calls = copied.calls = 1
        loss.calls += 1
        return loss(x, target) * loss.calls + copied(x, target)

    call = wrap(step)
    for number in range(3):
        x = seeded("cpu", 2, 4, seed=number)
        assert_identical([call(x)], [step(x)])
    assert len(call.captures()) == 1


@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_step_may_change_the_modes_of_modules(is_put_back: bool, wrap: Wrap) -> None:
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
def test_a_compiled_model_in_a_step_has_the_modes_of_what_it_wraps(wrap: Wrap) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inner = torch.compile(net, backend="eager")
    x = seeded("cpu", 2, 4)
    assert_identical([wrap(lambda x: inner(x).sum())(x)], [net(x).sum()])


def test_a_step_that_freezes_for_good_is_refused(wrap: Wrap) -> None:
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


def test_what_a_module_counts_is_named(wrap: Wrap) -> None:
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


class Remembering(nn.Module):
    """Sets an attribute to what `make` returns."""

    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        self.latest = self.make()
        return x * 2


def test_an_attribute_is_set_to_a_plain_value_or_refused(wrap: Wrap) -> None:
    x = torch.ones(4)
    plain = Remembering(lambda: 3)
    assert_identical([wrap(plain)(x)], [x * 2])
    assert plain.latest == 3
    other = Remembering(nullcontext)
    with pytest.raises(UsageError, match=r"sets Remembering.latest to an object of type nullco"):
        wrap(other)(x)
    assert not hasattr(other, "latest")


def test_what_a_step_puts_into_a_module_s_list_is_named(wrap: Wrap) -> None:
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


class Own(torch.optim.Optimizer):
    """An optimizer of a user's, with things besides the state of parameters."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.scale = 1.0
        self.param_groups[0]["factors"] = [1.0]
        self.sums = [torch.zeros_like(one) for one in self.param_groups[0]["params"]]
        self.seen: list[Tensor] = []
        self.calls = 0
        self.is_rebinding = self.is_keeping = self.is_counting = False

    @torch.no_grad()
    def step(self) -> None:
        self.calls += self.is_counting
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
    "an attribute": lambda own: setattr(own, "scale", 3.0),
    "a list in a group": lambda own: own.param_groups[0]["factors"].__setitem__(0, 0.5),
    "a list of tensors": lambda own: own.sums.__setitem__(0, torch.ones_like(own.sums[0])),
    "what belongs to no parameter": lambda own: own.state["shared"].clear(),
    "a hook": lambda own: own.register_step_pre_hook(doubled),
    "its step": lambda own: setattr(own, "step", lambda: None),
}


def with_own(make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = Own) -> Trainer:
    """Return a trainer with another optimizer."""
    trainer = Trainer()
    trainer.optimizer = make(trainer.net.parameters())
    return trainer


def test_what_changes_in_an_optimizer_takes_effect(wrap: Wrap) -> None:
    pair = Pair(wrap, with_own)
    pair.assert_alike("nothing")
    for name, change in CHANGES_OF_OPTIMIZERS.items():
        change(pair.plain.optimizer)
        change(pair.other.optimizer)
        pair.assert_alike(name)
        assert_identical(pair.other.optimizer.sums, pair.plain.optimizer.sums)


@pytest.mark.parametrize(
    ("flag", "named"),
    [("is_rebinding", "sums"), ("is_keeping", "seen"), ("is_counting", "calls")],
)
def test_what_an_optimizer_counts_is_named_and_as_it_was(flag: str, named: str, wrap: Wrap) -> None:
    trainer = with_own()
    own = trainer.optimizer
    trainer.step(seeded("cpu", 8, 8))
    before = list(own.sums)
    setattr(own, flag, True)
    with pytest.raises(UsageError, match=rf"counts in Python \('{named}' became "):
        wrap(trainer.step)(seeded("cpu", 8, 8))
    assert all(one is other for one, other in zip(own.sums, before, strict=True))
    assert (own.seen, own.calls) == ([], 0)


def test_a_group_that_a_step_adds_is_named_and_taken_out(wrap: Wrap) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.add_param_group({"params": list(net[1].parameters())})
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(UsageError, match=r"which groups .*call add_param_group\(\) outside"):
        wrap(step)(seeded("cpu", 8, 8))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert all(one.grad is None for one in net.parameters())


def test_sums_of_gradients_may_be_fused(wrap: Wrap) -> None:
    """SGD and Adagrad note that they have looked at types, which is no count."""

    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        pair = Pair(wrap, partial(with_own, partial(kind, lr=0.1, fused=True)))
        pair.assert_alike("the first, which makes the state")
        pair.assert_alike("nothing")


# --- settings of PyTorch ------------------------------------------------------------------------


def test_attention_is_run_by_the_kernel_that_is_asked_for(wrap: Wrap) -> None:
    def step(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    call = wrap(step)
    x = seeded("cpu", 2, 4, 64, 16)
    for _ in range(2):
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend):
                assert_identical([call(x)], [step(x)])


def test_a_second_capture_within_one_autocast_block_hides_no_update(wrap: Wrap) -> None:
    net = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(net.parameters())

    def step(x: Tensor) -> None:
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    call, x = wrap(step), seeded("cpu", 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        call(x)  # this capture makes the optimizer's state, so the next call has another one
        with pytest.raises(UsageError, match="autocast in"):
            call(x)


@pytest.mark.parametrize("is_update", [True, False])
def test_an_autocast_block_around_several_updates_is_refused(is_update: bool, wrap: Wrap) -> None:
    """PyTorch would compute with the weights as the block's first step cast them."""
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = net(x).float().square().mean()
        if is_update:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss

    call, x = wrap(step), seeded("cpu", 4, 8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            call(x)
    before = net.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        call(x)
        changed = net.weight.detach().clone()
        for _ in range(2):
            with pytest.raises(UsageError, match="autocast in") if is_update else nullcontext():
                call(x)
    assert torch.equal(net.weight, changed)
    assert torch.equal(before, changed) is not is_update


def test_autocast_without_a_block_that_ends_is_refused(wrap: Wrap) -> None:
    """PyTorch computes with the weights as they were first cast, for good."""
    trainer, x = Trainer(), seeded("cpu", 8, 8)
    call, look = wrap(trainer.step), wrap(lambda x: trainer.net(x).float())
    call(x)
    torch.set_autocast_enabled("cpu", True)
    try:
        with torch.no_grad():
            for _ in range(3):
                assert_identical([look(x)], [trainer.net(x).float()])
        with pytest.raises(UsageError, match="without a block that ends"):
            call(x)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    call(x)


def test_casts_of_weights_are_kept_or_not_as_autocast_is_told(wrap: Wrap) -> None:
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


def test_a_step_within_hooks_is_refused_whether_captured_before_or_not(wrap: Wrap) -> None:
    call = wrap(Trainer().step)
    x = seeded("cpu", 8, 8)
    for _ in range(3):
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda one: one * 2, lambda one: one),
            pytest.raises(UsageError, match="saved tensors are handed to hooks"),
        ):
            call(x)
        call(x)


def test_a_step_may_run_in_inference_mode(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
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


class Doubling(TorchFunctionMode):
    """Doubles what is multiplied."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return found + found if func is torch.mul else found


def test_a_mode_around_a_call_takes_effect(wrap: Wrap) -> None:
    call, x = wrap(lambda x: torch.mul(x, 1.5)), torch.ones(4)
    for mode in (nullcontext(), nullcontext(), Doubling(), Doubling(), nullcontext()):
        with mode:
            [found] = [call(x)]
        assert_identical([found], [x * 1.5 * (1 + isinstance(mode, Doubling))])


def test_a_step_whose_own_code_is_replaced_takes_effect(wrap: Wrap) -> None:
    """As `%autoreload` does it."""

    def step(x: Tensor) -> Tensor:
        return x * 1.5

    def other(x: Tensor) -> Tensor:
        return x * 2.5

    call, x = wrap(step), torch.ones(4)
    for _ in range(2):
        assert_identical([call(x)], [x * 1.5])
    step.__code__ = other.__code__
    assert_identical([call(x)], [x * 2.5])
