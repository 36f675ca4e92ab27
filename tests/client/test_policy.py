from __future__ import annotations

from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from storm_client import policy
from storm_client.planner import OFFLOAD, Keep
from storm_client.policy import Policy
from support.following import follow_by
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype):UserWarning")
"""Of PyTorch's, about sparse and nested tensors."""


class Subclass(torch.Tensor):
    pass


def quantized() -> Tensor:
    return torch.ops.aten.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8)


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.ones(64)


@pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning")
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
        (quantized, "quantized"),
        (made_in_inference_mode, "inference"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_reason(make: Callable[[], Tensor], reason: str | None) -> None:
    assert Policy([], min_bytes=64).decide(make()) == (OFFLOAD if reason is None else Keep(reason))


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
    for dtype in (torch.float32, torch.float64):
        net.to(dtype)
        policy.refresh()
        assert policy.decide(net.weight.data) == Keep("parameter")


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_are_looked_at_only_after_a_hook_was_registered(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between each forward and its backward pass a model's modules took up to a millisecond."""
    looks, known = [], policy.modules_inside
    monkeypatch.setattr(
        policy, "modules_inside", lambda modules: looks.append(modules) or known(modules)
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    of_model = Policy([model], 1)
    assert not of_model.acts_on_gradients_early()
    assert not of_model.acts_on_gradients_early()
    assert len(looks) == 1
    handle = getattr(model[1].bias, hook)(lambda _: None)
    assert of_model.acts_on_gradients_early()
    assert of_model.acts_on_gradients_early()
    handle.remove()
    assert not of_model.acts_on_gradients_early()


def test_a_hook_of_a_parameter_that_replaces_another_counts() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    other.weight.register_hook(lambda _: None)
    of_model = Policy([model], 1)
    assert isinstance(of_model.decide(model[0].weight), Keep)
    assert not of_model.acts_on_gradients_early()
    model[0] = other
    of_model.refresh()
    assert isinstance(of_model.decide(other.weight.detach()), Keep)
    assert of_model.acts_on_gradients_early()


def test_steps_that_compiled_code_follows_look_at_no_modules(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen first layers, or a batch that is saved, cost each step a look at all parameters."""
    looks, look_up = [], Policy._look_up
    monkeypatch.setattr(Policy, "_look_up", lambda self: looks.append(self) or look_up(self))
    followed = follow_by("compiled", monkeypatch)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    offload, batch = client.offload(net, min_bytes=4096, budget=0.0), torch.ones(64, 64)
    counts = []
    for _ in range(12):
        with offload:
            loss = net(batch.clone()).sum()
        loss.backward()
        counts.append(len(looks))
    assert counts[0] > 0
    assert counts[-1] == counts[-4]
    assert all(followed[-3:])
    assert not followed.left
