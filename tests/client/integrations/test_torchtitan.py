"""The policy for torchtitan, against a stand-in with the surface that its source has.

torchtitan itself is not installed: it asks for nightly builds of PyTorch. What stands in is read
from its `config/configurable.py` and `distributed/activation_checkpoint.py`, August 2026: a policy
is a class with a nested Config, whose `build` makes one, and `apply(model)` is called once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import pytest
import storm_client as storm
import torch
from storm_client.connecting import _SHARED, Connected
from storm_client.integrations import torchtitan as integration
from support.training import assert_identical, gradients, seeded
from torch import Tensor, nn


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=replace(self), **kwargs)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        config = vars(cls).get("Config")
        if config is not None:
            if "__slots__" not in vars(config):
                raise TypeError(f"{cls.__name__}.Config needs slots")
            config._owner = cls


class ActivationCheckpointing(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config = config
        self.dump_folder = dump_folder


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for i in range(2)}
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch, client: storm.Client) -> Iterator[Any]:
    """StormOffload over the stand-in, with the test's client as the one the process shares."""
    stand_in = ModuleType("torchtitan.distributed.activation_checkpoint")
    stand_in.ActivationCheckpointing = ActivationCheckpointing  # type: ignore[attr-defined]
    for name in ("torchtitan", "torchtitan.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(_SHARED, "_connected", Connected(client._supply, None))
    yield integration.StormOffload
    del integration.StormOffload


def _trained(model: nn.Module) -> list[Tensor]:
    loss = model(seeded("cpu", 64, 32).exp()).square().mean()
    loss.backward()
    return [loss.detach(), *gradients(model)]


def test_losses_and_gradients_are_identical(policy: Any) -> None:
    plain, model = Transformer(), Transformer()
    expected = _trained(plain)
    made = policy.Config(min_bytes=1).build(dump_folder="")
    assert type(made) is policy
    names = list(dict(model.named_modules()))
    made.apply(model)
    assert list(dict(model.named_modules())) == names, "checkpoints keep their names"
    assert_identical(_trained(model), expected)
    stats = made.offload.stats()
    assert stats.offloaded_bytes > 0
    assert not stats.kept


def test_it_is_one_class_that_a_configuration_names(policy: Any) -> None:
    assert policy is integration.StormOffload
    assert issubclass(policy, ActivationCheckpointing)
    assert (policy.__module__, policy.__qualname__) == (integration.__name__, "StormOffload")
    block = nn.Linear(2, 2)
    assert policy.Config().build()._wrap_block(block, base_fqn="layers.0") is block
    with pytest.raises(storm.UsageError, match="codec is 'zip'"):
        policy.Config(codec="zip").build().apply(block)
    assert "forward" not in vars(block)
    with pytest.raises(AttributeError, match="has no attribute 'FullAC'"):
        _ = integration.FullAC
