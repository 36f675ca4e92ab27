"""What a step leaves in Python objects at its capture: it is refused by name, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step.compiled import CompiledStep
from storm_client.step.side_effects import Objects
from support.training import assert_identical
from torch import Tensor, nn

Wrap = Callable[..., CompiledStep]


class Meter:
    """Sums losses up."""

    def __init__(self) -> None:
        self.total: Any = 0.0
        self.count = 0

    def update(self, loss: Any) -> None:
        self.total = self.total + loss
        self.count += 1


class Training:
    """A layer, its optimizer, and what a step may put things into."""

    def __init__(self) -> None:
        self.net = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.meter = Meter()
        self.logs: dict[str, dict[str, list[Any]]] = {"train": {"losses": []}}

    def step(self, x: Tensor, leave: Callable[[Training, Tensor], object]) -> Tensor:
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        leave(self, loss.detach())
        return loss

    def has(self) -> list[object]:
        schedule = {key: one for key, one in vars(self.schedule).items() if key != "optimizer"}
        return [vars(self.meter), self.logs, schedule]


LEFT: dict[str, Callable[[Training, Tensor], object]] = {
    "meter.total": lambda one, loss: one.meter.update(loss),
    "meter.total ": lambda one, loss: one.meter.update(loss.item()),
    "losses": lambda one, loss: one.logs["train"]["losses"].append(loss),
    "schedule": lambda one, _: one.schedule.step(),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_a_step_leaves_in_objects_is_named_and_put_back(name: str, wrap: Wrap) -> None:
    one = Training()
    before = repr(one.has())

    def step(x: Tensor) -> Tensor:
        assert one.meter
        assert one.logs
        assert one.schedule
        return one.step(x, LEFT[name])

    with pytest.raises(UsageError, match=rf"leaves what it computes in .*{name.strip()}"):
        wrap(step)(torch.ones(2, 4))
    assert repr(one.has()) == before


def test_what_a_step_that_fails_has_left_is_put_back(wrap: Wrap) -> None:
    one = Training()
    weight = one.net.weight.detach().clone()

    def step(x: Tensor) -> Tensor:
        assert one.meter
        loss = one.step(x, LEFT["meter.total"])
        raise ZeroDivisionError(loss.shape)

    with pytest.raises(ZeroDivisionError):
        wrap(step)(torch.ones(2, 4))
    assert vars(one.meter) == {"total": 0.0, "count": 0}
    assert_identical([one.net.weight], [weight])


def test_tables_of_arguments_may_be_changed_but_get_no_tensors(wrap: Wrap) -> None:
    def pops(batch: dict[str, Tensor]) -> Tensor:
        return batch.pop("x") * batch["y"]

    def puts(batch: dict[str, Tensor]) -> None:
        batch["z"] = batch["x"] * 2

    batch = {"x": torch.ones(4), "y": torch.full((4,), 2.0)}
    for _ in range(2):
        assert_identical([wrap(pops)(dict(batch))], [batch["y"]])
    with pytest.raises(UsageError, match="puts a tensor into a list or table"):
        wrap(puts)(batch)
    assert list(batch) == ["x", "y"]


def test_a_receiver_is_not_called_by_a_capture(wrap: Wrap) -> None:
    with storm.Receiver(float) as receive, pytest.raises(UsageError, match="the code that calls"):
        wrap(receive)(torch.ones(()))


def test_what_refers_to_itself_is_looked_at_once() -> None:
    held: dict[str, object] = {"a": 1.5}
    held["held"] = [held]

    def step() -> object:
        return held

    objects = Objects(step, ())
    assert objects.first(lambda value: value is held) == "held"
    assert objects.first(lambda value: value == 2) is None
