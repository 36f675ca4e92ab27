"""Whether steps find gradients of parameters, which decides where there is room for what stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from support.planning import latest_problem
from torch import nn

STEPS = 6


def trained(client: storm.Client, *ends: Callable[[nn.Module], None]) -> list[bool]:
    """Train a step before each end; return whether plans count on gradients there."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    offload, found = client.offload(model, min_bytes=1024), []
    for end in ends:
        with offload:
            loss = model(torch.ones(64, 64)).square().sum()
        loss.backward()
        end(model)
        found.append(latest_problem(offload).finds_gradients)
    return found


def let_go_at_once(model: nn.Module) -> None:
    """As an optimizer does whose step is part of the backward pass."""
    model.zero_grad()
    for parameter in model.parameters():
        if not parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))


def zero_grad(model: nn.Module) -> None:
    model.zero_grad()


@pytest.mark.parametrize(
    ("end", "finds"),
    [
        (zero_grad, False),
        (lambda model: model.zero_grad(set_to_none=False), True),
        (lambda _: None, True),
        (let_go_at_once, True),
    ],
)
def test_a_step_finds_gradients_that_nobody_has_let_go(
    end: Callable[[nn.Module], None], finds: bool, client: storm.Client
) -> None:
    assert trained(client, *[end] * STEPS)[-1] is finds


def test_a_step_that_accumulates_later_is_planned_anew(client: storm.Client) -> None:
    found = trained(client, *[zero_grad] * STEPS, *[lambda _: None] * STEPS)
    assert found == [False] * (STEPS + 1) + [True] * (STEPS - 1)


def test_ranks_may_have_gradients_elsewhere(client: storm.Client) -> None:
    """DDP's buckets are there from the begin."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert trained(client, *[zero_grad] * STEPS)[-1]
    finally:
        torch.distributed.destroy_process_group()
