from __future__ import annotations

import threading

import pytest
import torch
from storm_client.monitoring.layers import MODEL, NOWHERE, Layers, layer_name, modules_inside
from torch import Tensor, nn


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("", MODEL),
        ("head", "head"),
        ("model.layers.3.mlp.up", "model.layers.3"),
        ("12", "12"),
        ("encoder.block_2.3.0", "encoder.block_2.3"),
        ("model.norm.scale", "model"),
    ],
)
def test_a_layer_is_a_name_up_to_its_first_number(module: str, layer: str) -> None:
    assert layer_name(module) == layer


def test_parts_are_those_that_pytorch_finds() -> None:
    shared = nn.Linear(1, 1)
    net = nn.Sequential(nn.ModuleList([nn.Sequential(shared, nn.ReLU()), shared]), nn.ModuleDict())
    net.register_module("none", None)
    parts = list(modules_inside([net, shared]))
    assert len(parts) == len(set(parts))
    assert set(parts) == set(net.modules())


class Asking(nn.Module):
    """Notes where it is asked from inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Layers | None = None
        self.answers: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        assert self.layers is not None
        self.answers.append(self.layers.current().layer)
        return x


def asking(net: nn.Module, *others: nn.Module) -> list[Asking]:
    layers = Layers([net, *others])
    found = [one for module in (net, *others) for one in module.modules()]
    asked = [one for one in found if isinstance(one, Asking)]
    for one in asked:
        one.layers = layers
    return asked


def test_the_innermost_layer_whose_forward_runs_is_named() -> None:
    net = nn.Sequential(nn.Sequential(Asking(), nn.Tanh()), Asking())
    asked = asking(net)
    net(torch.zeros(1))
    assert [one.answers for one in asked] == [["0"], ["1"]]


def test_nothing_is_named_outside_or_without_modules() -> None:
    assert Layers([nn.Linear(1, 1)]).current() is NOWHERE
    assert Layers([]).current() is NOWHERE


def test_each_of_several_models_has_its_own_names() -> None:
    first, second = nn.Sequential(Asking()), nn.Sequential(Asking())
    asked = asking(first, second)
    first(torch.zeros(1))
    second(torch.zeros(1))
    assert [one.answers for one in asked] == [["0:0"], ["1:0"]]


def test_a_thread_is_in_its_own_layer() -> None:
    net = nn.Sequential(Asking(), nn.Identity())
    (asked,) = asking(net)
    inside: list[str] = []

    def ask(module: nn.Module, arguments: object) -> None:
        thread = threading.Thread(target=lambda: inside.append(asked.layers.current().path))
        thread.start()
        thread.join(30)

    net[0].register_forward_pre_hook(ask)
    net(torch.zeros(1))
    assert inside == [""]
    assert asked.answers == ["0"]
