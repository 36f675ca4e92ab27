"""What is told of a plan, and how often."""

from __future__ import annotations

from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.transport.session import Session
from torch import nn

STEPS = 8


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the plans that sessions are told, as they are told of them."""
    plans: list[Any] = []
    tell = Session.tell

    def noting(session: Session, plan: Any, budget: Any) -> None:
        plans.append(plan)
        tell(session, plan, budget)

    monkeypatch.setattr(Session, "tell", noting)
    return plans


def train(offload: storm.Offload, net: nn.Module, steps: int = STEPS, rows: int = 256) -> None:
    for _ in range(steps):
        with offload:
            loss = net(torch.ones(rows, 64)).square().mean()
        loss.backward()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64))


def shown(client: storm.Client) -> list[Any]:
    plans = [session["plan"] for session in client.status().details["sessions"]]
    return [plan for plan in plans if plan is not None]


def test_the_daemon_is_told_of_each_plan_once(client: storm.Client, told: list[Any]) -> None:
    net = network()
    offload = client.offload(net, min_bytes=4096, budget=0.5)
    train(offload, net, steps=1)
    assert told == []
    train(offload, net)
    assert 1 <= len(told) <= 2, "learned, and once more when its steps have been timed"
    assert told[-1] == offload.plan
    sizes = told[-1].bytes_by_decision
    assert shown(client) == [
        {
            "kept_bytes": sizes["keep"],
            "offloaded_bytes": sizes["offload"],
            "replayed_bytes": sizes["replay"],
            "budget": "0.5",
        }
    ]
    assert sizes["keep"] > 0


def test_another_kind_of_step_is_told_of_too(client: storm.Client, told: list[Any]) -> None:
    net = network()
    offload = client.offload(net, min_bytes=4096)
    train(offload, net)
    before = len(told)
    train(offload, net, rows=512)
    assert before < len(told) <= 2 * before + 2
    assert told[-1].bytes_by_decision != told[0].bytes_by_decision
