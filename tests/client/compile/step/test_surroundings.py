"""What a captured step reads besides its arguments: a change takes effect, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import storm_client as storm
import torch
from storm_client.compile.step.compiled import CompiledStep
from storm_client.errors import UsageError
from support.steps import everything
from support.training import assert_identical, seeded
from torch import Tensor, nn

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
