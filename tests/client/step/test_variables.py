"""What is compared of a function's surroundings: values by value, objects by themselves."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from storm_client.step.variables import identified, variables, variables_of_type
from torch import nn


class Plain:
    """An object."""


def test_values_are_compared_by_value() -> None:
    for value in (1, 1.0, True, "a", None, torch.float32, (1, (2, "b")), [1, (2,)], {"a": 1}):
        assert identified(value) == identified(value)
    for one, other in ((1, 1.0), (1, True), ([1], (1,)), ([1, 2], [2, 1]), (0.0, -0.0)):
        assert identified(one) != identified(other)
    assert identified(float("nan")) == identified(float("nan"))
    assert identified(1j) == identified(1j) != identified(-1j)
    assert identified(np.float32(0.1)) == identified(np.float32(0.1)) != identified(np.float32(1))
    assert identified(bytearray(b"a")) == identified(bytearray(b"a")) != identified(bytearray(b"b"))
    objects = [np.array([one, None], dtype=object) for one in (1, 2)]
    assert identified(objects[0]) == identified(objects[0].copy()) != identified(objects[1])
    ordered = OrderedDict(a=1, b=2)
    before = identified(ordered)
    ordered.move_to_end("a")
    assert identified(ordered) != before
    assert identified({1, "a"}) == identified({"a", 1}) != identified({1, 2})
    assert identified(np.arange(3)) == identified(np.arange(3)) != identified(np.arange(1, 4))
    for held in (OrderedDict(a=1), Counter(a=1), defaultdict(int, a=1), deque([1]), {1}):
        before = identified(held)
        assert before == identified(held)
        held.update({"a": 2}) if isinstance(held, dict) else held.__init__([2])  # type: ignore[misc]
        assert before != identified(held)


# --- steps, each with what changes one of its variables -------------------------------------------


class Settings:
    """What has a value in its class, in a slot, and behind a property."""

    __slots__ = ("_hidden", "slot")
    scale = 1.0

    def __init__(self) -> None:
        self.slot = self._hidden = 1.0

    @property
    def shown(self) -> float:
        return self._hidden


GLOBAL = {"a": 1.0}


def plain_of(held: dict[str, float]) -> Callable[[float], float]:
    return lambda x: x * held["a"]


def decorated(held: dict[str, float]) -> Callable[..., float]:
    plain = plain_of(held)

    @wraps(plain)
    def around(x: float) -> float:
        return plain(x)

    return around


def keyword(held: dict[str, float]) -> Callable[..., float]:
    return lambda x, *, own=held: x * own["a"]


class Called:
    """What is called itself."""

    def __init__(self, held: dict[str, float]) -> None:
        self.held = held

    def __call__(self, x: float) -> float:
        return x * self.held["a"]


@pytest.mark.parametrize(
    "made",
    [
        plain_of,
        decorated,
        keyword,
        Called,
        lambda held: partial(plain_of(held)),
        lambda held: partial(lambda own, x: own["a"] * x, held),
        lambda held: torch.no_grad()(plain_of(held)),
        lambda _: lambda x: [x * one * GLOBAL["a"] for one in (1, 2)],
    ],
)
def test_a_step_is_seen_into_whatever_it_is_made_of(
    made: Callable[[dict[str, float]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"a": 1.0}
    step = made(held)
    before = variables(step)
    assert before == variables(step)
    held["a"] = 2.0
    monkeypatch.setitem(GLOBAL, "a", 2.0)
    assert before != variables(step)


def test_a_variable_that_is_bound_anew_is_another() -> None:
    loss = torch.sum

    def step(x: torch.Tensor) -> torch.Tensor:
        return loss(x)

    before = variables(step)
    assert before == variables(step)
    loss = torch.mean
    assert before != variables(step)


@pytest.mark.parametrize("name", ["scale", "slot", "_hidden"])
def test_what_an_object_has_in_its_class_or_slots_or_behind_a_property_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings()

    def step(own: Settings = settings) -> float:
        return settings.scale + settings.slot + own.shown

    before, given = variables(step), variables(step, [settings])
    assert before == variables(step)
    assert given == variables(step, [settings]) != variables(step, [Settings()])
    monkeypatch.setattr(Settings if name == "scale" else settings, name, 2.0)
    assert before != variables(step)
    assert given != variables(step, [settings])


def test_what_a_class_and_a_module_have_is_seen() -> None:
    class Constants:
        scale = 1.0

    module = ModuleType("settings")
    module.power = 1.0

    def step() -> float:
        return Constants.scale + module.power

    before = variables(step)
    Constants.scale = 2.0
    assert before != (then := variables(step))
    module.power = 2.0
    assert then != variables(step)


def test_a_step_may_be_of_no_module() -> None:
    surroundings = {"a": 1.0}
    exec("def step(x): return a * x", surroundings)
    step = surroundings["step"]
    step.__module__ = None
    before = variables(step)
    surroundings["a"] = 2.0
    assert before != variables(step)


def test_what_a_function_has_of_a_kind_is_found_in_its_object_too() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.rate = nn.Linear(1, 1), 0.1

        def step(self) -> float:
            return self.rate + len(list(layer.parameters()))

    layer, trainer = nn.Linear(2, 2), Trainer()
    assert variables_of_type(trainer.step, nn.Module) == [layer, trainer.net]
    assert variables_of_type(nn.Linear(1, 1), nn.Module) == []
