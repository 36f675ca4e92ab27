"""Steps follow several plans one after another, and then the one that took the least time.

A GPU's steps are compared. Here they are the host's, and take as long as a test says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import storm_client as storm
import torch
from storm_client.eager import controller, plan_maker, step_times
from storm_client.eager.comparison import Comparison
from storm_client.eager.marks import Span
from storm_client.eager.proofs import Trial
from storm_client.eager.signature import StepSignature
from storm_client.planner.decisions import Replay
from storm_client.planner.machine import CPU, TransferFigures
from storm_client.planner.problem import Problem
from storm_client.planner.search import (
    ALL_KEPT,
    MORE,
    NOTHING,
    OFFLOAD_ALONE,
    PREDICTED,
    Alternative,
    PlanSearch,
)
from storm_client.transport.daemon_loss import Supply
from support.planning import Took, value
from torch import nn

STEPS = 50
"""Those that learn, and more than any comparison takes."""

ROWS = 256


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have steps be compared, though their values lie in the host's memory."""
    monkeypatch.setattr(StepSignature, "is_on_gpu", property(lambda _: True))
    monkeypatch.setattr(step_times.StepTimes, "wants_full_queue", property(lambda _: False))
    monkeypatch.setattr(controller, "give_back_unused", lambda _: None)
    machine = replace(CPU, link=1e-7, codec=1e-9, thread_store=1e-9, thread_recompute=1e-6)
    monkeypatch.setattr(plan_maker, "machine_of", lambda _: machine)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Alternative], float]], None]:
    """Return what has steps take so long, by the plan that they follow."""

    def take(seconds: Callable[[Alternative], float]) -> None:
        known = step_times.StepTimes.record_step

        def record_step(self: step_times.StepTimes, alternative: Alternative, _: Span) -> None:
            known(self, alternative, Took(seconds(alternative)))

        monkeypatch.setattr(step_times.StepTimes, "record_step", record_step)

    return take


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(3)]
    return nn.Sequential(*layers)


def trained(net: nn.Module, context: object, steps: int = STEPS) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        net.zero_grad()
        with context:  # type: ignore[attr-defined]
            loss = net(torch.linspace(-1, 1, 64 * ROWS).view(ROWS, 64) + step).square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]
    return found


def comparison_of(offload: storm.Offload) -> Comparison:
    return offload._planning._signatures.latest.comparison


def search_of(offload: storm.Offload) -> PlanSearch:
    return comparison_of(offload).search


def test_bits_are_the_same_whatever_is_followed_and_all_settles(
    client: storm.Client,
    caplog: pytest.LogCaptureFixture,
    take: Callable[[Callable[[Alternative], float]], None],
) -> None:
    take(lambda one: 0.2 + 0.1 * abs(one.link_share - 0.65) + 0.1 * (not one.recomputes))
    caplog.set_level(logging.INFO, "storm_client")
    net = network()
    offload = client.offload(net, min_bytes=4096)
    assert all(map(torch.equal, trained(network(), nullcontext()), trained(net, offload)))
    search = search_of(offload)
    assert search.is_settled
    assert search.steps <= 40
    assert len(search.results) > 2
    assert {OFFLOAD_ALONE, PREDICTED} <= search.results.keys()
    said = [one for one in caplog.messages if "of the plans that steps have followed" in one]
    assert len(said) == 1
    assert str(search) in said[0]
    assert said[0].endswith(offload.plan.in_short())
    assert f"compared: {search}" in str(offload.plan)


@pytest.mark.parametrize("best", [PREDICTED, OFFLOAD_ALONE], ids=str)
def test_the_plan_that_took_the_least_is_followed_from_then_on(
    client: storm.Client,
    best: Alternative,
    take: Callable[[Callable[[Alternative], float]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where one of them watches no functions, so that its steps are of another signature."""
    caplog.set_level(logging.INFO, "storm_client")
    take(lambda one: 0.1 if one.recomputes == best.recomputes else 0.2)
    net = network()
    offload = client.offload(net, min_bytes=4096)
    trained(net, offload)
    assert search_of(offload).current.recomputes == best.recomputes
    before, plan = offload.stats(), offload.plan
    trained(net, offload, steps=2)
    after = offload.stats()
    (said,) = [one for one in caplog.messages if "of the plans that steps have followed" in one]
    assert said.endswith(plan.in_short())
    assert (plan.bytes_by_decision["replay"] > 0) is (best == PREDICTED)
    assert (after.replayed_bytes > before.replayed_bytes) is (best == PREDICTED)
    assert search_of(offload).current.recomputes == best.recomputes
    assert plan.bytes_by_decision == offload.plan.bytes_by_decision  # type: ignore[union-attr]


def test_turns_and_forward_passes_are_timed_only_until_all_plans_know_them(
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[[Callable[[Alternative], float]], None],
) -> None:
    """Each time takes two CUDA events, and so time of the training thread."""
    take(lambda _: 0.1)
    net = network()
    offload = client.offload(net, min_bytes=4096)
    trained(net, offload)
    timed: list[str] = []
    for name in ("observe", "record_turn"):
        monkeypatch.setattr(step_times.StepTimes, name, lambda *_, name=name: timed.append(name))
    trained(net, offload, steps=2)
    assert not timed


def test_plans_are_compared_anew_for_a_link_that_others_use_as_well(
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[[Callable[[Alternative], float]], None],
) -> None:
    take(lambda one: 0.2 + 0.1 * abs(one.link_share - 0.65) + 0.1 * (not one.recomputes))
    seconds = 1e-7
    for name in ("figures", "latest_figures"):
        monkeypatch.setattr(Supply, name, lambda *_: TransferFigures(link=seconds))
    net = network()
    offload = client.offload(net, min_bytes=4096)
    monkeypatch.setattr(offload._planning.maker, "ratio", lambda: 1.0)
    found = trained(net, offload)
    for seconds, is_news in ((1.1e-7, False), (3e-7, True), (1e-7, True)):
        compared = comparison_of(offload)
        assert compared.search.is_settled
        compared.is_reported = True
        found += trained(net, offload, steps=60)
        assert compared is comparison_of(offload)
        assert compared.search.is_settled
        assert compared.is_reported is True
        planned_for = seconds if is_news else 1e-7
        assert compared.machine.link == pytest.approx(planned_for)
    plain = [
        one for steps in (STEPS, 60, 60, 60) for one in trained(network(), nullcontext(), steps)
    ]
    assert all(map(torch.equal, plain, found))


def test_of_a_step_that_saves_little_all_stays_if_that_takes_less(
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[[Callable[[Alternative], float]], None],
) -> None:
    monkeypatch.setattr(plan_maker, "device_bytes", lambda _: 1 << 40)
    take(lambda one: 0.1 if one.keeps_all else 0.3)
    net = network()
    offload = client.offload(net, min_bytes=4096)
    assert all(map(torch.equal, trained(network(), nullcontext()), trained(net, offload)))
    assert search_of(offload).current == ALL_KEPT
    before = offload.stats()
    trained(net, offload, steps=2)
    after = offload.stats()
    assert after.offloaded_bytes == before.offloaded_bytes
    assert after.skipped["little"] > 0


def test_a_value_that_is_rejected_meanwhile_is_recomputed_by_no_plan(
    client: storm.Client,
    take: Callable[[Callable[[Alternative], float]], None],
) -> None:
    take(lambda _: 0.1)
    net = network()
    offload = client.offload(net, min_bytes=4096)
    trained(net, offload, steps=8)
    signature = offload._planning._signatures.latest
    again = [n for n, one in enumerate(signature.followed.decisions) if isinstance(one, Replay)]
    assert again
    Trial(signature, again[0], signature.followed, 1).fail("it had other bits")
    trained(net, offload, steps=20)
    for decisions in signature.comparison.decisions.values():
        assert len(decisions) == len(signature.root.values)
    assert not isinstance(signature.root.followed.decisions[again[0]], Replay)


def test_ranks_go_on_after_a_plan_that_decides_as_a_measured_one() -> None:
    """With two thirds of the link as much is recomputed as with none of it."""
    machine = replace(CPU, link=1.0, codec=0.01, thread_store=0.0, thread_recompute=0.0)
    values = value(0), *(value(n, 100, "silu", 0, seconds=20.0) for n in (1, 2))
    problem, compared = Problem(values, forward_seconds=200.0), Comparison(PlanSearch())
    for alternative, seconds in ((NOTHING, 1000.0), (PREDICTED, 900.0), (MORE, 800.0)):
        (turn,) = compared.choose_several(problem, machine, None)
        assert turn[0] == alternative
        compared.record_turns([alternative], [[seconds] * 4])
    assert compared.search.best == MORE


def test_a_plan_is_made_once_from_the_same_figures() -> None:
    values = value(0), *(value(n, 100, "silu", 0, seconds=20.0) for n in (1, 2))
    problem, compared = Problem(values, forward_seconds=200.0), Comparison(PlanSearch())
    made = compared.choose(problem, CPU, None)
    assert compared.choose(replace(problem), CPU, None) is made
    assert compared.choose(problem, CPU, 50) is not made
    assert compared.choose(problem, CPU, None) is not made
