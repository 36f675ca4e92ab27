"""What functions read that a captured step calls: a change takes effect, or is refused."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
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
    VARIABLE.set(1.0)


@pytest.mark.parametrize("name", READS)
def test_what_a_called_function_reads_takes_effect(name: str, wrap: Wrap) -> None:
    read, change = READS[name]
    results = []
    for way in (wrap, lambda step: step):
        job, found = Job(), list[Any]()
        set_scale(job, 1.0)
        Reversed.scale = 1.0
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
