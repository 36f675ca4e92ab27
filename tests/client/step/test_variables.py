"""What is compared of a function's surroundings: values by value, objects by themselves."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType

import numpy as np
import pytest
import torch
from storm_client.step.variables import (
    attributes,
    identified,
    is_value,
    variables,
    variables_of_type,
)
from torch import nn


class Plain:
    """An object."""


def test_values_are_compared_by_value() -> None:
    for value in (1, 1.0, True, "a", None, torch.float32, (1, (2, "b")), [1, (2,)], {"a": 1}):
        assert identified(value) == identified(value)
        assert is_value(value)
    assert identified(1) != identified(1.0)
    assert identified(1) != identified(True)
    assert identified([1]) != identified((1,))
    assert identified([1, 2]) == identified([1, 2])
    assert identified([1, 2]) != identified([2, 1])
    assert identified(0.0) != identified(-0.0)
    assert identified(float("nan")) == identified(float("nan"))
    assert identified(1j) == identified(1j) != identified(-1j)
    assert identified(np.float32(0.1)) == identified(np.float32(0.1)) != identified(np.float32(1))
    assert identified({1, "a"}) == identified({"a", 1}) != identified({1, 2})
    assert identified(np.arange(3)) == identified(np.arange(3)) != identified(np.arange(1, 4))


def test_lists_and_tables_of_any_type_are_compared_by_what_they_hold() -> None:
    for held in (OrderedDict(a=1), Counter(a=1), defaultdict(int, a=1), deque([1]), {1}):
        before = identified(held)
        assert before == identified(held)
        held.update({"a": 2}) if isinstance(held, dict) else held.__init__([2])  # type: ignore[misc]
        assert before != identified(held)


def test_objects_are_compared_by_identity_and_not_kept() -> None:
    one, other = Plain(), Plain()
    assert identified(one) == identified(one)
    assert identified(one) != identified(other)
    assert not is_value((1, one))
    known, weak = identified([one]), identified(one)
    del one
    gc.collect()
    assert weak != identified(other)
    assert known != identified([other])
    assert weak != weak


def test_what_takes_the_place_of_a_dead_object_is_another() -> None:
    def noted() -> tuple[object, int]:
        function = lambda: None  # noqa: E731 - made and dropped
        return identified(function), id(function)

    known, address = noted()
    others = [lambda: None for _ in range(64)]
    again = [one for one in others if id(one) == address]
    assert all(known != identified(one) for one in (*again, *others))


def test_a_function_that_is_bound_anew_is_another_variable() -> None:
    loss = torch.sum

    def step(x: torch.Tensor) -> torch.Tensor:
        return loss(x)

    before = variables(step)
    assert before == variables(step)
    loss = torch.mean
    assert before != variables(step)


class Settings:
    """What has a value in its class, in a slot, and behind a property."""

    __slots__ = ("_hidden", "slot")
    scale = 1.0

    def __init__(self) -> None:
        self.slot = self._hidden = 1.0

    @property
    def shown(self) -> float:
        return self._hidden


@pytest.mark.parametrize("name", ["scale", "slot", "_hidden"])
def test_what_an_object_has_in_its_class_or_slots_or_behind_a_property_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings()

    def step() -> float:
        return settings.scale + settings.slot + settings.shown

    before = variables(step)
    assert before == variables(step)
    monkeypatch.setattr(Settings if name == "scale" else settings, name, 2.0)
    assert before != variables(step)


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


def made_of(kind: str, held: dict[str, float]) -> Callable[..., float]:
    """Return a step that reads `held` in one of the ways in which steps are made."""

    def plain(x: float) -> float:
        return x * held["a"]

    class Object:
        def __call__(self, x: float) -> float:
            return x * held["a"]

    def keyword(x: float, *, own: dict[str, float] = held) -> float:
        return x * own["a"]

    def nested(x: float) -> list[float]:
        return [x * one * GLOBAL[kind]["a"] for one in (1, 2)]

    @wraps(plain)
    def decorated(x: float) -> float:
        return plain(x)

    GLOBAL[kind] = held
    return {
        "partial": partial(plain),
        "bound by partial": partial(lambda own, x: own["a"] * x, held),
        "object": Object(),
        "keyword": keyword,
        "nested": nested,
        "decorated": decorated,
        "no_grad": torch.no_grad()(plain),
    }[kind]


GLOBAL: dict[str, dict[str, float]] = {}


@pytest.mark.parametrize(
    "kind", ["partial", "bound by partial", "object", "keyword", "decorated", "no_grad"]
)
def test_a_step_is_seen_into_whatever_it_is_made_of(kind: str) -> None:
    held = {"a": 1.0}
    step = made_of(kind, held)
    before = variables(step)
    assert before == variables(step)
    held["a"] = 2.0
    assert before != variables(step)


def test_a_step_may_be_of_no_module() -> None:
    surroundings = {"a": 1.0}
    exec("def step(x): return a * x", surroundings)
    step = surroundings["step"]
    step.__module__ = None
    before = variables(step)
    surroundings["a"] = 2.0
    assert before != variables(step)


def test_what_only_an_inner_function_reads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    step = made_of("nested", {"a": 1.0})
    before = variables(step)
    monkeypatch.setitem(GLOBAL, "nested", {"a": 2.0})
    assert before != variables(step)


def test_objects_among_the_arguments_are_seen_into() -> None:
    def step(x: float, settings: Settings) -> float:
        return x * settings.slot

    settings = Settings()
    before = variables(step, [1.0, settings])
    assert before == variables(step, [1.0, settings]) != variables(step, [1.0, Settings()])
    settings.slot = 2.0
    assert before != variables(step, [1.0, settings])


def test_what_a_function_has_of_a_kind_is_found_in_its_object_too() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.rate = nn.Linear(1, 1), 0.1

        def step(self) -> float:
            return self.rate + len(list(layer.parameters()))

    layer, trainer = nn.Linear(2, 2), Trainer()
    assert variables_of_type(trainer.step, nn.Module) == [layer, trainer.net]
    assert variables_of_type(nn.Linear(1, 1), nn.Module) == []


def test_tensors_and_what_every_module_has_are_no_attributes() -> None:
    net = nn.Dropout(0.25)
    net.scale = torch.ones(1)
    assert set(attributes(net)) == {"p", "inplace"}
