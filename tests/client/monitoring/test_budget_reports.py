"""What `stormd advise` is told: once, after the steps that learn, and only if it asked."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_client.monitoring.budget_reports import BUDGETS, answers
from storm_client.planner.plan import Plan
from torch import nn

from stormd.protocol.variables import ADVISE_VARIABLE


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "advice"))
        listening.setblocking(False)
        monkeypatch.setenv(ADVISE_VARIABLE, str(tmp_path / "advice"))
        yield listening


def trained(client: storm.Client, steps: int) -> storm.Offload:
    net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    offload = client.offload(net)
    for _ in range(steps):
        with offload:
            loss = net(torch.ones(4096, 64)).square().sum()
        loss.backward()
    return offload


def test_it_is_told_once_after_eight_steps(client: storm.Client, listener: socket.socket) -> None:
    trained(client, 7)
    with pytest.raises(BlockingIOError):
        listener.recv(1)
    trained(client, 12)
    told = json.loads(listener.recv(1 << 16))
    assert [one["budget"] for one in told["budgets"]] == list(BUDGETS)
    kept = [one["keep_bytes"] for one in told["budgets"]]
    assert kept == sorted(kept)
    assert kept[-1] == told["saved_bytes"] == 9 << 20
    with pytest.raises(BlockingIOError):
        listener.recv(1)


def test_a_command_that_has_gone_stops_no_training(
    client: storm.Client, listener: socket.socket
) -> None:
    listener.close()
    assert trained(client, 9).stats().offloaded_bytes > 0


@pytest.mark.timeout(60)
def test_a_command_that_does_not_read_stops_no_training(
    client: storm.Client, listener: socket.socket
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.connect(listener.getsockname())
        other.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                other.send(b"unread")
        assert trained(client, 9).stats().offloaded_bytes > 0


def test_steps_that_save_nothing_are_told_of_too() -> None:
    told = answers([], 1.0, 0.5, [])
    assert (told["saved_bytes"], told["budgets"], told["step_seconds"]) == (0, [], 0.5)


@pytest.mark.parametrize(("step_seconds", "forward_seconds"), [(2.0, 0.5), (0.25, 0.25)])
def test_a_forward_pass_is_no_longer_than_the_step_it_is_part_of(
    step_seconds: float, forward_seconds: float
) -> None:
    plan = Plan((), 0, link_seconds=1.0, replay_seconds=0.0, forward_seconds=0.5)
    told = answers([plan], 1.0, step_seconds, [torch.device("cuda")])
    assert told["forward_seconds"] == forward_seconds
    assert told["budgets"][0]["wait_seconds"] == 1.0 - forward_seconds
