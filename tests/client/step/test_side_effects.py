"""What a step leaves in Python objects at its capture: it is refused by name, and put back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step.compiled import CompiledStep
from storm_client.step.places import held_by, put_back
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


def test_objects_of_pytorch_get_nothing_of_a_capture(wrap: Wrap) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    prior = torch.distributions.Categorical(torch.ones(4), validate_args=False)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = net(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return loss

    with pytest.raises(UsageError, match="GradScaler"):
        wrap(step)(torch.ones(2, 4))
    assert scaler.state_dict()["scale"] == 2.0
    with pytest.raises(UsageError, match=r"leaves what it computes in 'prior.logits'"):
        wrap(lambda x: x * prior.logits)(torch.ones(4))
    assert_identical([prior.logits], [torch.full((4,), 0.25).log()])


class Frozen(OrderedDict[str, int]):
    """Refuses changes, as the configurations of diffusers' models do."""

    def update(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        raise TypeError("frozen")

    __delitem__ = clear = update  # type: ignore[assignment]


def test_a_table_that_refuses_changes_is_left_alone(wrap: Wrap) -> None:
    net = nn.Linear(4, 4)
    net.config = Frozen(times=3)  # type: ignore[assignment]
    x = torch.ones(2, 4)
    assert_identical([wrap(lambda x: net(x) * net.config["times"])(x)], [net(x) * 3])  # type: ignore[index]


@pytest.mark.parametrize("kind", [dict, Counter, OrderedDict, Frozen])
def test_what_tables_held_is_put_back_by_the_builtin_methods(kind: type[dict[str, int]]) -> None:
    """A Counter would add what it is updated with."""
    held = kind(a=1, b=2)
    before = held_by(held)
    held["c"], held["b"] = 3, 4
    assert before is not None
    put_back(held, before)
    assert list(held.items()) == [("a", 1), ("b", 2)]
    assert list(reversed(held)) == ["b", "a"]


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


def test_what_refers_to_itself_is_looked_at_once(wrap: Wrap) -> None:
    held: dict[str, Any] = {"a": 1.5}
    held["held"] = [held]

    def step(x: Tensor, is_left: bool) -> Tensor:
        if is_left:
            held["held"].append({"x": x * 2})
        return x * held["held"][0]["a"]

    call, x = wrap(step), torch.ones(4)
    assert_identical([call(x, False)], [step(x, False)])
    with pytest.raises(UsageError, match=r"leaves what it computes in \"held\['held'\]\[1\]\""):
        call(x, True)
    assert held["held"] == [held]


class Slotted:
    """An object without a table."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


class Pair:
    """An object that is made anew, and put somewhere."""

    def __init__(self, value: object) -> None:
        self.value = value


class Everywhere(nn.Module):
    """All kinds of places in which code may leave something."""

    shared: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.meter, self.slotted = Meter(), Slotted()
        self.table: dict[str, list[Any]] = defaultdict(list)
        self.ordered: dict[str, Any] = OrderedDict(a=1, b=2)
        self.queue, self.members = deque([1]), {1}

    def has(self) -> list[object]:
        own = {key: one for key, one in vars(self).items() if key not in ("meter", "slotted")}
        cells = [one.cell_contents for one in noting.__closure__ or ()]
        return [
            {key: repr(one) for key, one in own.items()},
            {**vars(self.meter)},
            self.slotted.value,
            {key: one for key, one in vars(type(self)).items() if "abc" not in key},
            list(self.shared),
            vars(self.weight).keys(),
            vars(noting).keys(),
            cells,
            "LATEST" in globals(),
        ]


def noting_in(latest: object) -> Callable[[object], None]:
    def note(value: object) -> None:
        nonlocal latest
        latest = value

    return note


noting = noting_in(None)


PLACES: dict[str, Callable[[Everywhere, Tensor], object]] = {
    "defaultdict": lambda one, loss: one.table["losses"].append(loss),
    "OrderedDict": lambda one, loss: one.ordered.update(a=loss),
    "deque": lambda one, loss: one.queue.append(loss),
    "set": lambda one, loss: one.members.add(loss),
    "slots": lambda one, loss: setattr(one.slotted, "value", loss),
    "number in slots": lambda one, loss: setattr(one.slotted, "value", loss.item()),
    "a module": lambda one, loss: setattr(one, "latest", loss),
    "a module's object": lambda one, loss: one.meter.update(loss),
    "a class": lambda one, loss: setattr(type(one), "latest", loss),
    "a class's list": lambda one, loss: one.shared.append(loss),
    "a tensor": lambda one, loss: setattr(one.weight, "latest", loss),
    "a function": lambda _, loss: setattr(noting, "latest", loss),
    "new objects": lambda one, loss: one.queue.append(Pair([Pair({"x": loss})])),
    "parameters": lambda one, loss: one.register_parameter("other", one.weight),
    "submodules": lambda one, loss: one.add_module("other", nn.Identity()),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_a_step_that_is_refused_leaves_nothing_anywhere(name: str, fails: bool, wrap: Wrap) -> None:
    one = Everywhere()
    places = {"deep": [one, one.weight, one.slotted, Everywhere, noting]}
    before = one.has()

    def step(x: Tensor) -> Tensor:
        found = places["deep"][0]
        loss = (found.weight * x).sum()
        loss.backward()
        PLACES[name](found, loss.detach())
        if fails:
            raise ZeroDivisionError
        return loss

    with pytest.raises(ZeroDivisionError if fails else UsageError):
        wrap(step)(torch.ones(4))
    assert one.has() == before
    assert one.weight.grad is None


def test_variables_that_got_something_of_a_capture_s_are_put_back(wrap: Wrap) -> None:
    latest, losses = None, defaultdict(list)

    def step(x: Tensor, place: str) -> Tensor:
        nonlocal latest
        global LATEST  # noqa: PLW0603
        loss = x.sum()
        if place == "a cell":
            latest = loss
        elif place == "a global":
            LATEST = loss
        elif place == "an argument":
            x.latest = loss
        else:
            losses["x"].append(loss)
        return loss

    x = torch.ones(4)
    for place in ("a cell", "a global", "an argument", "a table"):
        with pytest.raises(UsageError, match=r"changes its variable|leaves what it computes"):
            wrap(step)(x, place)
        assert not hasattr(x, "latest")
        assert (latest, losses) == (None, {})
        assert "LATEST" not in globals()
