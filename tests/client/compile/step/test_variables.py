"""What is compared of a function's surroundings: values by value, objects by themselves."""

from __future__ import annotations

import gc

import torch
from storm_client.compile.step.variables import attributes, identified, is_value, own, variables
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


def test_what_a_function_has_of_a_kind_is_found_in_its_object_too() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.rate = nn.Linear(1, 1), 0.1

        def step(self) -> float:
            return self.rate + len(list(layer.parameters()))

    layer, trainer = nn.Linear(2, 2), Trainer()
    assert own(trainer.step, nn.Module) == [layer, trainer.net]
    assert own(nn.Linear(1, 1), nn.Module) == []


def test_tensors_and_what_every_module_has_are_no_attributes() -> None:
    net = nn.Dropout(0.25)
    net.scale = torch.ones(1)
    assert set(attributes(net)) == {"p", "inplace"}
