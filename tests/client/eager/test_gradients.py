"""Whether steps find gradients of parameters, which decides where there is room for what stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from storm_client.eager.signature import StepSignature
from torch import Tensor, nn

STEPS = 6


def trained(client: storm.Client, end: Callable[[nn.Module], None], steps: int = STEPS) -> bool:
    """Train some steps with `end` behind each; return whether a plan counts on gradients there."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    offload = client.offload(model, min_bytes=1024)
    for _ in range(steps):
        with offload:
            loss = model(torch.ones(64, 64)).square().sum()
        loss.backward()
        end(model)
    return of(offload).finds_gradients


def of(offload: storm.Offload) -> StepSignature:
    signature = offload._planning._signatures.latest
    assert signature is not None
    assert offload._planning.maker.problem(signature).finds_gradients == signature.finds_gradients
    return signature


@pytest.mark.parametrize(
    ("end", "finds"),
    [
        (lambda model: model.zero_grad(), False),
        (lambda model: model.zero_grad(set_to_none=False), True),
        (lambda _: None, True),
    ],
)
def test_a_step_finds_gradients_that_nobody_has_let_go(
    end: Callable[[nn.Module], None], finds: bool, client: storm.Client
) -> None:
    assert trained(client, end) is finds


def test_gradients_that_a_hook_uses_at_once_do_not_fill_the_backward_pass(
    client: storm.Client,
) -> None:
    """As of an optimizer whose step is part of it."""

    def end(model: nn.Module) -> None:
        model.zero_grad()
        for parameter in model.parameters():
            if not parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]

                def let_go(one: Tensor) -> None:
                    one.grad = None

                parameter.register_post_accumulate_grad_hook(let_go)

    assert trained(client, end)


def test_a_step_that_accumulates_later_is_planned_anew(client: storm.Client) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    offload = client.offload(model, min_bytes=1024)
    found = []
    for number in range(2 * STEPS):
        with offload:
            loss = model(torch.ones(64, 64)).square().sum()
        loss.backward()
        if number < STEPS:
            model.zero_grad()
        found.append(of(offload).finds_gradients)
    assert found == [False] * (STEPS + 1) + [True] * (STEPS - 1)
    assert not of(offload).is_outdated


def test_ranks_may_have_gradients_elsewhere(client: storm.Client) -> None:
    """DDP's buckets are there from the begin."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert trained(client, lambda model: model.zero_grad())
    finally:
        torch.distributed.destroy_process_group()
