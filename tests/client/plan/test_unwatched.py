"""Steps that save so little, and take the thread so long, that most of them have no hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import storm_client as storm
import torch
from storm_client.plan import planning
from storm_client.plan.kinds import HostBound, Kind
from support.daemon_process import DaemonProcess
from support.training import Context, assert_identical, gradients
from support.waiting import wait_until
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

STEPS = 3 * planning.UNWATCHED
ROWS = 64


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device of which all that the tests save is little; steps are bound by the host."""
    seen = SimpleNamespace(little=1 << 30, allocated=0)

    def look(kind: Kind, forward_seconds: float | None) -> None:
        if kind.host is None and kind.decisions is not None and forward_seconds:
            kind.host = HostBound(1.0)

    monkeypatch.setattr(planning, "_look_for_host", look)
    monkeypatch.setattr(planning, "_little_bytes", lambda _: seen.little)
    monkeypatch.setattr(planning, "allocated_bytes", lambda: seen.allocated)
    return seen


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 8))


def step(net: nn.Module, context: Context, rows: int = ROWS) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, 32)
    net.zero_grad()
    with context():
        loss = net(x).square().mean()
    loss.backward()
    return [loss.detach().clone(), *(gradient.clone() for gradient in gradients(net))]


def watched(offload: storm.Offload, net: nn.Module, rows: int = ROWS) -> bool:
    """Do a step, and tell whether it had hooks."""
    before = offload.stats()
    assert_identical(step(net, lambda: offload, rows), step(net, nullcontext, rows))
    after = offload.stats()
    return (before.saved_bytes, before.skipped_bytes) != (after.saved_bytes, after.skipped_bytes)


def test_most_steps_have_no_hooks(client: storm.Client, device: SimpleNamespace) -> None:
    net = network()
    offload = client.offload(net, min_bytes=1)
    steps = [watched(offload, net) for _ in range(STEPS)]
    first = steps.index(False)
    assert all(steps[:first])
    assert planning.ALIKE <= first < STEPS - 2 * planning.UNWATCHED + planning.ALIKE
    assert steps[first:][: planning.UNWATCHED + 2] == [
        *[False] * planning.UNWATCHED,
        True,
        False,
    ]
    assert offload.plan is not None
    assert offload.plan.bytes_by_decision["offload"] == 0
    assert offload.report().steps == STEPS


@pytest.mark.parametrize("budget", ["64MiB", 0.5, "fit"])
def test_who_names_a_budget_has_all_steps_watched(
    client: storm.Client, device: SimpleNamespace, budget: str | float
) -> None:
    net = network()
    offload = client.offload(net, min_bytes=1, budget=budget)
    assert all(watched(offload, net) for _ in range(STEPS))


def test_a_step_that_saves_more_than_little_is_watched(
    client: storm.Client, device: SimpleNamespace
) -> None:
    device.little = 0
    net = network()
    offload = client.offload(net, min_bytes=1)
    assert all(watched(offload, net) for _ in range(STEPS))


def unwatch(offload: storm.Offload, net: nn.Module) -> None:
    while watched(offload, net):
        pass
    assert not watched(offload, net)


def test_what_takes_much_more_memory_is_watched_and_planned(
    client: storm.Client, device: SimpleNamespace
) -> None:
    net = network()
    offload = client.offload(net, min_bytes=1)
    unwatch(offload, net)
    with offload:
        loss = net(torch.randn(16 * ROWS, 32)).square().mean()
        device.allocated += 1 << 30
    loss.backward()
    device.allocated, device.little = 0, 0
    assert watched(offload, net, 16 * ROWS)
    offloaded = offload.stats().offloaded_bytes
    for _ in range(planning.ALIKE):
        assert watched(offload, net, 16 * ROWS)
    assert offload.stats().offloaded_bytes > offloaded


def test_kinds_in_turns_are_all_watched(client: storm.Client, device: SimpleNamespace) -> None:
    net = network()
    offload = client.offload(net, min_bytes=1)
    assert all(watched(offload, net, rows) for _ in range(STEPS // 2) for rows in (ROWS, 2 * ROWS))


def test_a_step_that_fails_has_the_next_ones_watched(
    client: storm.Client, device: SimpleNamespace
) -> None:
    net = network()
    offload = client.offload(net, min_bytes=1)
    unwatch(offload, net)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), offload:
        net(torch.randn(4, 3))
    assert watched(offload, net)


def test_blocks_inside_each_other_end_in_their_order(
    client: storm.Client, device: SimpleNamespace
) -> None:
    net = network()
    outer, inner = client.offload(net, min_bytes=1), client.offload(net, min_bytes=1)
    unwatch(inner, net)
    before = outer.stats()
    with outer:
        with inner:
            first = net(torch.randn(ROWS, 32))
        second = net(torch.randn(ROWS, 32))
    (first + second).sum().backward()
    assert outer.stats().saved_bytes > before.saved_bytes
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_hooks_of_others_are_handed_nothing(client: storm.Client, device: SimpleNamespace) -> None:
    net, seen = network(), []
    offload = client.offload(net, min_bytes=1)
    unwatch(offload, net)
    for _ in range(planning.UNWATCHED):
        with saved_tensors_hooks(lambda tensor: seen.append(0) or tensor, lambda tensor: tensor):
            step(net, lambda: offload)
    assert not seen


def test_a_plain_call_leaves_what_a_plain_call_entered(
    client: storm.Client, device: SimpleNamespace
) -> None:
    net = network()
    offload = client.offload(net, min_bytes=1)
    unwatch(offload, net)
    offload.__enter__()
    step(net, nullcontext)
    offload.__exit__(None, None, None)
    assert not watched(offload, net)


def test_a_step_without_hooks_says_that_the_daemon_is_lost(
    make_daemon: Callable[..., DaemonProcess], device: SimpleNamespace
) -> None:
    daemon = make_daemon("--pool-bytes", "64MiB")
    with storm.connect(daemon.address, timeout=30) as client:
        net = network()
        offload = client.offload(net, min_bytes=1)
        unwatch(offload, net)
        daemon.kill()
        wait_until(lambda: client._supply.sessions.lost)
        with pytest.raises(storm.DaemonLost), offload:
            net(torch.randn(ROWS, 32))
