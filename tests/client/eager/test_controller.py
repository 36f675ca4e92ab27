"""What is told of a plan, and how often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.eager.controller import Planning
from storm_client.eager.signature import Kind
from storm_client.planner import shortage
from storm_client.transport.session import Session
from support.daemon_process import DaemonProcess
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


def test_over_a_slow_link_more_stays(make_daemon: Callable[..., DaemonProcess]) -> None:
    """A plan is made of what the daemon says of its link: what it has no time for stays."""
    kept = {}
    for limit in (0, 1 << 20):
        daemon = make_daemon("--link-limit-bytes", str(limit))
        with storm.connect(daemon.address, embedded="never") as client:
            assert client.status().details["link_limit_bytes"] == limit
            torch.manual_seed(0)
            net = nn.Linear(64, 64)
            offload = client.offload(net, min_bytes=4096, codec="raw")
            for _ in range(8):
                with offload:
                    loss = net(net(torch.ones(256, 64))).square().mean()
                time.sleep(0.004)  # in which the fast link takes what was saved last
                loss.backward()
            assert offload.plan is not None
            kept[limit] = offload.plan.bytes_by_decision["keep"]
    assert kept[0] == 0
    assert kept[1 << 20] == 256 * 64 * 4


class Blocks(nn.Module):
    """Layers in a list, of which each makes some tensors that are saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = lambda: [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]  # noqa: E731
        layer = lambda: nn.Sequential(*parts(), nn.LayerNorm(64))  # noqa: E731
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tensor = layer(tensor)
        return tensor


def test_with_the_least_budget_no_more_is_in_flight_than_checkpointing_would_keep(
    client: storm.Client,
) -> None:
    net, rows = Blocks(), 256
    for budget, is_bounded in (("least", True), (0.5, False)):
        offload = client.offload(net, min_bytes=4096, budget=budget)
        train(offload, net, steps=3, rows=rows)
        plan = offload.plan
        assert plan is not None
        one = rows * 64 * 4
        kept = 3 * one
        assert plan.checkpointed_bytes == kept + 2 * one  # the batch, and what the loss saves
        assert plan.turn_bytes == (kept - plan.bytes_by_decision["keep"] if is_bounded else None)
        assert "checkpointing each block would keep" in str(plan)
        (session,) = client._supply.sessions._open_sessions()
        assert session.transfers.window.at_turn == plan.turn_bytes


def test_a_plan_has_less_room_where_memory_has_run_out(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortage, "_LACKED", {})
    net = network()
    offload = client.offload(net, min_bytes=4096, budget=1.0)
    train(offload, net)
    assert offload.plan is not None
    before = offload.plan.bytes_by_decision["keep"]
    cpu = torch.device("cpu")
    monkeypatch.setattr(Planning, "devices", [cpu])
    shortage.note_shortage(cpu, before // 2)
    train(offload, net)
    assert 0 < offload.plan.bytes_by_decision["keep"] <= before - before // 2


def test_a_plan_is_made_by_one_thread_at_a_time(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations are run again for it, in memory that is one thread's."""
    offload = client.offload(min_bytes=1)
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        x.exp().sum().backward()
    planning, making, seen = offload._planning, threading.Event(), []
    real = planning._make

    def make(kind: Kind) -> None:
        seen.append(threading.get_ident())
        making.wait(0.2)  # as long as another thread would need
        real(kind)

    monkeypatch.setattr(planning, "_make", make)
    kind = planning._kinds.latest
    assert kind is not None
    kind.is_outdated = True
    threads = [threading.Thread(target=planning.plan) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 1
