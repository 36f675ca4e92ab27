from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from storm_client import policy as policy_module
from storm_client.planner import OFFLOAD, Keep
from storm_client.policy import LOOK_EVERY, Policy
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype):UserWarning")
"""Of PyTorch's, about sparse and nested tensors."""


class Subclass(torch.Tensor):
    pass


def quantized() -> Tensor:
    return torch.ops.aten.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(64), None),
        (lambda: torch.ones(64, 64).t(), None),
        (lambda: torch.ones(2), "small"),
        (lambda: torch.ones(0), "small"),
        (lambda: torch.ones(64).as_subclass(Subclass), "subclass"),
        (lambda: torch.eye(64).to_sparse(), "sparse"),
        (lambda: torch.eye(64).to_sparse_csr(), "sparse"),
        (lambda: torch.ones(64, 64).to_mkldnn(), "layout"),
        (lambda: torch.nested.nested_tensor([torch.ones(64), torch.ones(32)]), "nested"),
        (lambda: torch.ones(64, device="meta"), "meta"),
        (lambda: nn.Parameter(torch.ones(64)), "parameter"),
        (lambda: nn.Parameter(torch.ones(64, 64)).t(), "parameter"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_reason(make: Callable[[], Tensor], reason: str | None) -> None:
    assert Policy([], min_bytes=128).decide(make()) == (OFFLOAD if reason is None else Keep(reason))


@pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning")
def test_quantized() -> None:
    assert Policy([], min_bytes=1).decide(quantized()) == Keep("quantized")


def test_inference() -> None:
    with torch.inference_mode():
        tensor = torch.ones(64)
    assert Policy([], min_bytes=1).decide(tensor) == Keep("inference")


def test_a_tensor_inside_a_function_transform() -> None:
    reasons = []

    def function(x: Tensor) -> Tensor:
        reasons.append(Policy([], min_bytes=1).decide(x))
        return x.sum()

    torch.func.vmap(function)(torch.ones(4, 64))
    assert reasons == [Keep("subclass")]


def test_parameters_and_buffers_are_known_by_their_storage() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    policy = Policy([net], min_bytes=1)
    policy.refresh()
    weight, mean = net[0].weight, net[1].running_mean
    for tensor in (weight.detach(), weight.data.t(), weight.detach()[2:], mean, mean.view(4, 4)):
        assert policy.decide(tensor) == Keep("parameter")
    assert policy.decide(weight.detach().clone()) == OFFLOAD


def test_a_module_that_moved_is_known_again_after_refresh() -> None:
    net = nn.Linear(16, 16)
    policy = Policy([net], min_bytes=1)
    policy.refresh()
    net.double()
    policy.refresh()
    assert policy.decide(net.weight.detach()) == Keep("parameter")


def test_modules_are_not_looked_through_for_what_operations_have_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Linear(16, 16)
    policy = Policy([net], min_bytes=1)
    result = net(torch.ones(16, 16))

    def looked(modules: object) -> NoReturn:
        raise AssertionError("looked through")

    monkeypatch.setattr(policy_module, "modules_inside", looked)
    policy.refresh()
    for tensor in (result, result[1:], net.weight, net.weight.t()):
        policy.decide(tensor)
    with pytest.raises(AssertionError, match="looked through"):
        policy.decide(torch.ones(16, 16))


def test_what_is_new_in_a_module_is_known_some_looks_later() -> None:
    """Until then it is a tensor that somebody else holds."""
    net = nn.Linear(16, 16)
    policy = Policy([net], min_bytes=1)
    policy.decide(torch.ones(16, 16))
    net.register_buffer("mask", torch.ones(16, 16))
    for _ in range(LOOK_EVERY):
        policy.refresh()
        decision = policy.decide(net.mask)
    assert decision == Keep("parameter")


def test_tied_weights_are_one_storage() -> None:
    embedding, head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
    head.weight = embedding.weight
    policy = Policy([embedding], min_bytes=1)
    policy.refresh()
    assert policy.decide(head.weight.detach().t()) == Keep("parameter")
