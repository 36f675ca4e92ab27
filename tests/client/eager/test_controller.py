"""What is told of a plan, and how often."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.eager import controller
from storm_client.eager.signature import StepSignature
from storm_client.planner import DeviceWindow, shortage
from support.daemon_process import DaemonProcess
from support.waiting import wait_until
from torch import nn

STEPS = 8


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


def test_the_daemon_is_told_of_the_plan(client: storm.Client) -> None:
    net = network()
    offload = client.offload(net, min_bytes=4096, budget=0.5)
    train(offload, net, steps=1)
    assert shown(client) == []
    train(offload, net)
    sizes = offload.plan.bytes_by_decision
    assert shown(client) == [
        {
            "kept_bytes": sizes["keep"],
            "offloaded_bytes": sizes["offload"],
            "replayed_bytes": sizes["replay"],
            "budget": "0.5",
        }
    ]
    assert sizes["keep"] > 0


def test_a_plan_follows_the_link(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """One is made for a slow link, and another once it is fast again.

    What the slow one has no time for stays. How much that is depends on how fast the steps are.
    """
    settings = tmp_path / "stormd.toml"
    settings.touch()
    daemon = make_daemon("--config", str(settings))
    with storm.connect(daemon.address, embedded="never") as client:
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        offload = client.offload(net, min_bytes=4096, codec="raw")

        def takes_it_for_slow() -> bool | None:
            train(offload, net, steps=1)
            plan = offload.plan
            if plan is None:
                return None
            offloaded = plan.bytes_by_decision["offload"]
            assert offloaded > 0
            return plan.link_seconds / offloaded > 1e-8  # a CPU's has 1.5 GB/s

        for limit in (0, 1 << 20, 0):
            settings.write_text(f"link_limit_bytes = {limit}")
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda limit=limit: client.status().details["link_limit_bytes"] == limit)
            wait_until(lambda limit=limit: takes_it_for_slow() == bool(limit))


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
        one = rows * 64 * 4
        kept = 3 * one
        assert plan.checkpointed_bytes == kept + 2 * one  # the batch, and what the loss saves
        assert plan.turn_bytes == (kept - plan.bytes_by_decision["keep"] if is_bounded else None)
        assert "checkpointing each block would keep" in str(plan)
        (session,) = client._supply.sessions.open
        assert session.transfers.window.limit_at_forward_end == plan.turn_bytes


def test_with_the_least_budget_prefetches_use_no_memory_that_happens_to_be_free(
    client: storm.Client,
) -> None:
    """Where no blocks are known either: it would raise the step's peak."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU())
    for budget, is_bounded in (("least", True), (0.5, False)):
        offload = client.offload(net, min_bytes=4096, budget=budget)
        train(offload, net, steps=3, rows=256)
        assert offload.plan.checkpointed_bytes is None
        assert (offload.plan.turn_bytes is not None) == is_bounded
    window = DeviceWindow(4 << 30)
    window.limit_at_forward_end = 0
    assert window.prefetch_limit(1 << 40, 0) == window.limit


def test_a_plan_has_less_room_where_memory_has_run_out(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortage, "_SHORTAGES", {})
    net = network()
    offload = client.offload(net, min_bytes=4096, budget=1.0)
    train(offload, net)
    before = offload.plan.bytes_by_decision["keep"]
    cpu = torch.device("cpu")
    monkeypatch.setattr(controller, "shortage_bytes", lambda _: shortage.shortage_bytes([cpu]))
    shortage.record_shortage(cpu, before // 2)
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

    def make(signature: StepSignature) -> None:
        seen.append(threading.get_ident())
        making.wait(0.2)  # as long as another thread would need
        real(signature)

    monkeypatch.setattr(planning, "_make", make)
    signature = planning._signatures.latest
    signature.outdate()
    threads = [threading.Thread(target=planning.plan) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 1
