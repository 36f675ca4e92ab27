"""What functions read that a captured step calls: a change takes effect, or is refused."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step.compiled import CompiledStep
from support.training import assert_identical, seeded
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Wrap = Callable[..., CompiledStep]

SCALE = 1.0
VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=1.0)


class Settings:
    """Settings that are looked up as in libraries for them."""

    default = 1.0

    def __init__(self) -> None:
        object.__setattr__(self, "held", {"scale": 1.0})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.held[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def value(self) -> float:
        return float(self.held["scale"])

    __call__ = __float__ = value


class Registry:
    """Gives objects out that its user reads."""

    def __init__(self, **held: Any) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Any:
        return self._held[name]


class Held:
    """An object with an attribute."""

    def __init__(self) -> None:
        self.scale = 1.0


class Kind(type):
    """A class of classes, which has an attribute for all of them."""

    common = 1.0


class OfKind(metaclass=Kind):
    """One of them."""


@dataclass(slots=True)
class Slots:
    """An object whose class is asked for, too."""

    size: float = 1.0


class Net(nn.Module):
    """A model that has its settings in an object, as those of Hugging Face have."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.config.scale * self.shared * SCALE


class Reversed(torch.autograd.Function):
    """Reverses gradients, times a number that a schedule raises."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * -Reversed.scale


class Job:
    """A training with everything that its step may look up."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.average = AveragedModel(self.net)
        self.settings, self.local = Settings(), threading.local()
        self.local.scale, self.box = 1.0, [1.0]
        self.tree: dict[str, Any] = {"loss": {"scale": 1.0}, "mask": {"of": torch.ones(4)}}
        self.bound = self.closure(1.0)
        self.held, self.slots = Held(), Slots()
        self.registry, self.weak = Registry(one=self.held), weakref.ref(self.held)
        self.values = weakref.WeakValueDictionary({"one": self.held})
        self.memory, self.view = ctypes.c_double(1.0), self.tree["loss"].values()
        self.mask = torch.ones(4)

    def closure(self, scale: float) -> tuple[Callable[[], float], Callable[[float], None]]:
        def get() -> float:
            return scale

        def put(now: float) -> None:
            nonlocal scale
            scale = now

        return get, put


def set_scale(job: Job, value: float) -> None:
    global SCALE  # noqa: PLW0603
    SCALE = value


def set_held(job: Job, value: float) -> None:
    job.settings.held["scale"] = value


def set_loss(job: Job, value: float) -> None:
    job.tree["loss"]["scale"] = value


def set_in_held(job: Job, value: float) -> None:
    job.held.scale = value


def imported() -> float:
    import storm_test_settings  # type: ignore[import-not-found]
    from storm_test_settings import scale

    return float(scale + storm_test_settings.scale)


def added_to(owner: Any) -> float:
    try:
        return float(owner.added)
    except AttributeError:
        return 1.0


def added_global() -> float:
    try:
        return ADDED  # type: ignore[name-defined,no-any-return]
    except NameError:
        return 1.0


def replaced() -> float:
    return 1.0


def of_slots(slots: Any) -> float:
    return float(slots.size) if isinstance(slots, Slots) else 0.0


def set_code(job: Job, value: float) -> None:
    replaced.__code__ = eval(f"lambda: {value}").__code__


def weigh(settings: Any) -> float:
    return float(settings["scale"])


READS: dict[str, tuple[Callable[[Job, Tensor], Any], Callable[[Job, float], object]]] = {
    "last_epoch": (lambda job, _: job.rates.last_epoch + 1, lambda job, _: job.rates.step()),
    "get_last_lr": (lambda job, _: job.rates.get_last_lr()[0], lambda job, _: job.rates.step()),
    "get_scale": (
        lambda job, _: job.scaler.get_scale(),
        lambda job, value: setattr(job.scaler, "_init_scale", value),
    ),
    "n_averaged": (
        lambda job, _: job.average.n_averaged + 1,
        lambda job, _: job.average.update_parameters(job.net),
    ),
    "an attribute behind __getattr__": (
        lambda job, _: job.settings.scale,
        set_held,
    ),
    "getattr": (
        lambda job, _: getattr(job.settings, "later", 1.0),
        lambda job, value: vars(job.settings).update(later=value),
    ),
    "an attribute that hides the class's": (
        lambda job, _: job.settings.default,
        lambda job, value: vars(job.settings).update(default=value),
    ),
    "an item": (
        lambda job, _: job.settings["scale"],
        set_held,
    ),
    "a method": (
        lambda job, _: job.settings.value(),
        set_held,
    ),
    "a call": (lambda job, _: job.settings(), set_held),
    "float()": (
        lambda job, _: float(job.settings),
        set_held,
    ),
    "an argument": (
        lambda job, _: weigh(job.tree["loss"]),
        set_loss,
    ),
    "a table in a table": (
        lambda job, _: job.tree["loss"]["scale"],
        set_loss,
    ),
    "a tensor in a table": (
        lambda job, _: job.tree["mask"]["of"],
        lambda job, value: job.tree["mask"].update(of=torch.full((4,), value)),
    ),
    "a closure": (lambda job, _: job.bound[0](), lambda job, value: job.bound[1](value)),
    "a thread's": (lambda job, _: job.local.scale, lambda job, v: setattr(job.local, "scale", v)),
    "a context's": (lambda *_: VARIABLE.get(), lambda _, value: VARIABLE.set(value)),
    "what an object gives out": (lambda job, _: job.registry["one"].scale, set_in_held),
    "a weak reference": (lambda job, _: job.weak().scale, set_in_held),
    "a weak table": (lambda job, _: job.values["one"].scale, set_in_held),
    "all attributes": (lambda job, _: sum(vars(job.held).values()), set_in_held),
    "an attribute that is added": (
        lambda job, _: added_to(job.held),
        lambda job, value: setattr(job.held, "added", value),
    ),
    "a global that is added": (
        lambda *_: added_global(),
        lambda _, value: globals().update(ADDED=value),
    ),
    "slots": (
        lambda job, _: of_slots(job.slots),
        lambda job, value: setattr(job.slots, "size", value),
    ),
    "a class of classes": (
        lambda *_: OfKind.common,
        lambda _, value: setattr(Kind, "common", value),
    ),
    "memory": (
        lambda job, _: job.memory.value,
        lambda job, value: setattr(job.memory, "value", value),
    ),
    "a view of a table": (lambda job, _: sum(job.view), set_loss),
    "a module that is imported": (
        lambda *_: imported(),
        lambda _, value: setattr(sys.modules["storm_test_settings"], "scale", value),
    ),
    "the environment": (
        lambda *_: float(os.getenv("STORM_TEST_SCALE", "1")),
        lambda _, value: os.environ.update(STORM_TEST_SCALE=str(value)),
    ),
    "code": (lambda *_: replaced(), set_code),
    "a tensor's version": (lambda job, _: job.mask._version, lambda job, _: job.mask.add_(1.0)),
    "a model's settings": (lambda *_: 1, lambda job, v: setattr(job.net.config, "scale", v)),
    "a model's class": (lambda *_: 1, lambda job, v: setattr(job.net, "shared", v)),
    "a global of a model's": (lambda *_: 1, set_scale),
    "a function's backward": (
        lambda _, x: Reversed.apply(x).mean(),  # type: ignore[no-untyped-call]
        lambda _, value: setattr(Reversed, "scale", value),
    ),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setattr(Reversed, "scale", 1.0)
    monkeypatch.setattr(Kind, "common", 1.0)
    monkeypatch.setattr(replaced, "__code__", replaced.__code__)
    monkeypatch.setitem(sys.modules, "storm_test_settings", ModuleType("storm_test_settings"))
    monkeypatch.setenv("STORM_TEST_SCALE", "1")
    VARIABLE.set(1.0)


@pytest.mark.parametrize("name", READS)
def test_what_a_called_function_reads_takes_effect(name: str, wrap: Wrap) -> None:
    read, change = READS[name]
    results = []
    for way in (wrap, lambda step: step):
        job, found = Job(), list[Any]()
        set_scale(job, 1.0)
        Reversed.scale = Kind.common = 1.0
        sys.modules["storm_test_settings"].scale = 1.0  # type: ignore[attr-defined]
        os.environ["STORM_TEST_SCALE"] = "1"
        globals().pop("ADDED", None)
        set_code(job, 1.0)
        VARIABLE.set(1.0)

        def step(x: Tensor, job: Job = job) -> Tensor:
            y = job.net(x)
            loss = (y * read(job, y)).square().mean()
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            return loss

        call = way(step)
        for number in range(4):
            found.append(call(seeded("cpu", 2, 4, seed=number)))
            change(job, number + 2.0)
        results.append([*found, *(one.detach() for one in job.net.parameters())])
    assert_identical(*results)


def test_hooks_read_what_there_is_at_each_step(wrap: Wrap) -> None:
    net, scale = nn.Linear(4, 4), [1.0]
    net.register_forward_hook(lambda *given: given[2] * scale[0])

    def step(x: Tensor) -> Tensor:
        return net(x).square()  # type: ignore[no-any-return]

    call, x = wrap(step), torch.ones(2, 4)
    for value in (1.0, 2.0, 3.0):
        scale[0] = value
        assert_identical([call(x)], [step(x).detach()])


class Counter:
    """Counts calls, or what it has set once, or what it resets in each step."""

    def __init__(self) -> None:
        self.count, self.has_begun, self.depth = 0, False, 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def begin(self) -> int:
        if not self.has_begun:
            self.has_begun = True
            return 7
        return 1

    def enter(self) -> int:
        vars(self).update(depth=3)
        found = self.inner()
        vars(self).update(depth=0)
        return found

    def inner(self) -> int:
        return self.depth


def test_what_a_called_function_counts_is_refused_by_name(wrap: Wrap) -> None:
    counter = {"of": Counter()}
    call, x = wrap(lambda x: x * counter["of"].add()), torch.ones(4)
    assert_identical([call(x)], [x])
    with pytest.raises(UsageError, match=r"changes .*count again and again"):
        call(x)


@pytest.mark.parametrize("name", ["begin", "enter"])
def test_what_is_set_once_or_in_each_step_is_not_refused(name: str, wrap: Wrap) -> None:
    one, other = {"of": Counter()}, {"of": Counter()}
    call, x = wrap(lambda x: x * getattr(one["of"], name)()), torch.ones(4)
    for _ in range(4):
        assert_identical([call(x)], [x * getattr(other["of"], name)()])
    assert len(call.captures()) == {"begin": 2, "enter": 1}[name]


MASK: Any = None


def masked(x: Tensor) -> Tensor:
    global MASK  # noqa: PLW0603
    if MASK is None:
        MASK = torch.ones(4) * 2
    return x * MASK


def test_what_a_called_function_leaves_in_a_global_is_named_and_put_back(wrap: Wrap) -> None:
    def step(x: Tensor) -> Tensor:
        return masked(x)

    with pytest.raises(UsageError, match=r"leaves what it computes in \".*test_called\['MASK'\]"):
        wrap(step)(torch.ones(4))
    assert MASK is None


ASKED = io.StringIO()
"""What `Untouchable` was asked for: a stream, of which a comparison sees only that it is one."""


class Untouchable:
    """An object that notes what it is asked for."""

    __slots__ = ("__dict__", "__weakref__", "value")

    def __init__(self) -> None:
        self.value, self.scale = 2.0, 1.5

    def __getattribute__(self, name: str) -> Any:
        ASKED.write(f"{name} ")
        return object.__getattribute__(self, name)


def test_objects_are_not_asked_for_what_they_have(wrap: Wrap) -> None:
    held, x = {"of": Untouchable()}, torch.ones(4)

    def step(x: Tensor) -> Tensor:
        return x * held["of"].value * held["of"].scale

    call = wrap(step)
    for _ in range(3):
        assert_identical([call(x)], [x * 3])
    asked = ASKED.getvalue().split()
    # Once by the step's own code in each of its two captures, of which one confirms the other.
    assert (asked.count("value"), asked.count("scale")) == (2, 2)
    assert set(asked) == {"value", "scale", "__class__"}


def test_what_a_step_makes_is_its_own_concern(client: storm.Client) -> None:
    class Result:
        def __init__(self, value: Tensor) -> None:
            self.value, self.me = value, self  # it lives until garbage is collected

        def total(self) -> Tensor:
            return self.value.sum()

    call = storm.compile_step(lambda x: Result(x * 2).total(), client=client, codegen="eager")
    for number in range(3):
        x = seeded("cpu", 4, seed=number)
        assert_identical([call(x)], [(x * 2).sum()])
    assert len(call.captures()) == 1


def test_a_step_that_is_captured_again_and_again_says_why_once(
    wrap: Wrap, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SimpleNamespace(scale=1.0)

    def scaled(x: Tensor) -> Tensor:
        return x * settings.scale

    call = wrap(lambda x: scaled(x).sum())
    x = torch.ones(4)
    for number in range(7):
        settings.scale = float(number)
        assert_identical([call(x)], [(x * number).sum()])
    [message] = caplog.messages
    assert "captured again and again" in message
    assert "SimpleNamespace.scale differs between calls" in message


class Link:
    """One of a long chain of objects."""

    def __init__(self, scale: float, behind: Link | None) -> None:
        self.scale, self.behind = scale, behind


def test_long_chains_are_followed(wrap: Wrap) -> None:
    last = chain = Link(1.0, None)
    for _ in range(3000):
        chain = Link(0.0, chain)

    def total(x: Tensor) -> Tensor:
        link: Link | None = chain
        scale = 0.0
        while link is not None:
            scale, link = scale + link.scale, link.behind
        return x * scale

    call, x = wrap(lambda x: total(x).sum()), torch.ones(4)
    for last.scale in (1.0, 2.0):
        assert_identical([call(x)], [total(x).sum()])


class Output:
    """What a model returns, as those of Hugging Face do."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def run_model(x: Tensor) -> Output:
    return Output(x.square().sum())


def test_a_global_with_the_name_of_an_attribute_that_is_read_is_no_concern(wrap: Wrap) -> None:
    """A script's loop assigns `loss`, and its step reads `model(x).loss`."""
    globals()["loss"] = torch.zeros(1)
    try:
        for step in (lambda x: run_model(x).loss, halved_outside):
            call = wrap(step)
            for number in range(3):
                x = seeded("cpu", 4, seed=number)
                globals()["loss"] = call(x)
                assert_identical([globals()["loss"]], [step(x)])
            assert len(call.captures()) == 1
    finally:
        del globals()["loss"]


def halved(x: Tensor) -> Tensor:
    return run_model(x).loss / 2


def halved_outside(x: Tensor) -> Tensor:
    return halved(x)


def test_loggers_may_be_asked_for_their_levels(wrap: Wrap) -> None:
    logger = logging.getLogger("storm_test")

    def scale() -> float:
        return 2.0 if logger.isEnabledFor(logging.DEBUG) else 1.0

    call, x = wrap(lambda x: x * scale()), torch.ones(4)
    for level in (logging.INFO, logging.INFO, logging.DEBUG, logging.INFO):
        logger.setLevel(level)
        assert_identical([call(x)], [x * scale()])


class Scaled(torch.optim.Optimizer):
    """Has a table in a table among its settings."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "scales": {"of": {"all": 1.0}}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad, alpha=group["lr"] * group["scales"]["of"]["all"])


def test_what_a_setting_of_an_optimizer_holds_takes_effect(wrap: Wrap) -> None:
    results = []
    for way in (wrap, lambda step: step):
        net = nn.Linear(4, 4)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        optimizer = Scaled(net.parameters())

        def step(x: Tensor, net: nn.Module = net, optimizer: Scaled = optimizer) -> None:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        call = way(step)
        for number in range(4):
            call(seeded("cpu", 2, 4, seed=number))
            optimizer.param_groups[0]["scales"]["of"]["all"] = number + 2.0
        results.append([net.weight.detach()])
    assert_identical(*results)
