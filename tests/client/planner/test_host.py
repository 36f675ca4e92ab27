"""What is chosen where the training thread's time decides, and when that is taken to be so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import storm_client as storm
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_client.eager import controller as planning
from storm_client.eager.signature import SAVED, Kind
from storm_client.planner import host as host_module
from storm_client.planner.decisions import LAST, OFFLOAD, REPLAY, Decision, Keep
from storm_client.planner.host import (
    HostBound,
    HostPass,
    Load,
    choose_for_host,
    host_bound,
    load_of,
    spare_seconds,
    thread_slower,
)
from storm_client.planner.machine import CPU
from storm_client.planner.problem import Problem, Value
from storm_client.planner.solver import Choice, choose
from support.planning import recorded, value
from torch import nn

MACHINE = replace(
    CPU, link=1e-9, codec=1e-9, thread_store=0.0, thread_recompute=0.0, unmeasured=5e-11
)
STAYS, FITS = Keep("host"), Keep("budget")
EVENTS = host_module.STORED.forward + host_module.STORED.backward


class Passed:
    """Some seconds that are known."""

    is_known = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds


def chosen(values: Sequence[Value], budget_bytes: int = 0, **more: Any) -> Choice:
    return choose(Problem(tuple(values), **more), MACHINE, budget_bytes=budget_bytes)


def decided(
    values: Sequence[Value], host: HostBound, *, room: int | None = None, link: float = 0.0
) -> list[Decision]:
    choice = chosen(values, budget_bytes=room or 0)
    return choose_for_host(choice, values, host, link=link, room=room).decisions


def time_for(count: int, of: int) -> HostBound:
    """Return a step that checkpointing makes longer by what so many values need that leave."""
    kept = host_module.KEPT.forward + host_module.KEPT.backward
    return HostBound((1e-9 + count * EVENTS + (of - count) * kept) / host_module.CHECKPOINTING)


def test_what_takes_less_than_checkpointing_is_as_it_would_be_on_any_device() -> None:
    values = [value(0), value(1, 100, "silu", 0)]
    assert decided(values, HostBound(1.0)) == [OFFLOAD, REPLAY]


def test_the_largest_leave_for_as_long_as_checkpointing_takes() -> None:
    values = [value(0, 10), value(1, 30), value(2, 20), value(3, 40)]
    assert decided(values, time_for(2, of=4)) == [STAYS, OFFLOAD, STAYS, OFFLOAD]
    assert decided(values, time_for(3, of=4)) == [STAYS, OFFLOAD, OFFLOAD, OFFLOAD]
    assert decided(values, HostBound(0.0)) == [STAYS] * 4


def test_of_like_ones_what_was_saved_first_leaves() -> None:
    values = [value(number) for number in range(4)]
    assert decided(values, time_for(2, of=4)) == [OFFLOAD, OFFLOAD, STAYS, STAYS]


def test_nothing_is_made_again_where_not_all_can_go() -> None:
    values = [value(0, 10), value(1, 30, "silu", 0), value(2, 20, "silu", 1)]
    assert decided(values, time_for(1, of=3)) == [STAYS, OFFLOAD, STAYS]


def test_a_slower_machine_lets_less_leave() -> None:
    values = [value(number) for number in range(4)]
    bound = time_for(2, of=4)
    slower = HostBound(bound.forward_seconds, slower=2.0)
    assert decided(values, slower).count(OFFLOAD) < decided(values, bound).count(OFFLOAD) == 2


def test_what_the_link_needs_longer_than_the_forward_pass_is_waited_for() -> None:
    values = [value(number) for number in range(4)]
    bound = time_for(3, of=4)
    assert decided(values, bound, link=bound.forward_seconds / 100).count(OFFLOAD) < 3


def test_a_budget_lets_the_fewest_leave() -> None:
    values = [value(0, 10), value(1, 30), value(2, 20), value(3, 40)]
    assert decided(values, HostBound(0.0), room=60) == [FITS, FITS, FITS, OFFLOAD]
    assert decided(values, HostBound(0.0), room=59).count(OFFLOAD) == 2
    assert decided(values, HostBound(0.0), room=0) == [OFFLOAD] * 4
    assert decided([], HostBound(0.0), room=0) == []


def test_what_is_asked_for_at_once_stays_as_it_would() -> None:
    values = [value(0, 10), value(1, 1000)]
    choice = chosen(values, turn_seconds=0.0)
    assert choice.decisions == [OFFLOAD, LAST]
    assert choose_for_host(choice, values, HostBound(0.0), link=0.0).decisions == [STAYS, LAST]


sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


@given(sizes, st.floats(0.0, 0.01), st.integers(0, 5000))
def test_neither_the_time_nor_the_budget_is_passed(
    sizes: list[int], seconds: float, room: int
) -> None:
    values = [value(number, nbytes) for number, nbytes in enumerate(sizes)]
    host = HostBound(seconds)
    choice = chosen(values)
    least = choose_for_host(choice, values, host, link=0.0)
    load = load_of(values, least.decisions, 0)
    if OFFLOAD in least.decisions:
        assert load.forward + load.backward <= spare_seconds(host)
        assert math.isclose(least.host_seconds, load.forward + load.backward)
    within = choose_for_host(choice, values, host, link=0.0, room=room)
    assert within.kept_bytes <= room
    assert within.kept_bytes == sum(
        one.nbytes
        for one, decision in zip(values, within.decisions, strict=True)
        if isinstance(decision, Keep)
    )


def test_functions_are_watched_where_something_is_made_again() -> None:
    values = [value(0), value(1, 100, "silu", 0)]
    watched = load_of(values, [OFFLOAD, REPLAY], 10).forward
    assert watched - load_of(values, [OFFLOAD, REPLAY], 0).forward == pytest.approx(
        10 * host_module.WATCHED
    )
    assert load_of(values, [OFFLOAD, FITS], 10) == load_of(values, [OFFLOAD, FITS], 0)


def test_what_nobody_saved_and_nobody_makes_costs_nothing() -> None:
    one = value(0, saved=False)
    assert load_of([one], [OFFLOAD], 0) == Load(0.0, 0.0)


def test_a_thread_that_has_time_is_not_what_binds() -> None:
    assert host_bound([HostPass(0.3, 0.1)] * 2, 1.0, 0.1) is None
    assert host_bound([], 1.0, 0.1) is None


def test_the_shorter_pass_tells_what_the_script_takes_and_how_fast_the_machine_is() -> None:
    bound = host_bound([HostPass(2.0, 0.5), HostPass(1.0, 0.4)], 1.0, 0.2)
    assert bound == HostBound(pytest.approx(0.6), slower=pytest.approx(2.0))


def test_what_is_measured_is_never_all_ours() -> None:
    bound = host_bound([HostPass(1.0, 1.0)], 1.0, 1e-6)
    assert bound == HostBound(pytest.approx(0.1), slower=host_module.MOST_SLOWER)


def test_how_fast_the_thread_is_shows_wherever_something_is_done_for_values() -> None:
    assert thread_slower([HostPass(0.1, 0.02), HostPass(0.2, 0.03)], 0.04) == pytest.approx(0.5)
    assert thread_slower([], 0.04) is None
    assert thread_slower([HostPass(0.1, 0.02)], 0.0) is None


def timed(passes: Sequence[HostPass], waits: Sequence[bool]) -> Kind:
    """Return a kind whose one value has left in such forward passes of a second."""
    one = recorded(value(0), "cuda:0")
    made = Kind(((SAVED, 0, 100, None, ()),), [one])
    assert not made.times_the_host
    made.follow([OFFLOAD])
    for host, device_waits in zip(passes, waits, strict=True):
        assert made.times_the_host
        made.observe(Passed(1.0), host)
        made.turned(Passed(0.0), device_waits=device_waits)
    return made


def test_a_kind_is_bound_by_the_host_if_the_device_has_waited_each_time() -> None:
    passes = [HostPass(0.9, 0.4)] * 2
    made = timed(passes, [True, True])
    planning._look_for_host(made, made.problem(recomputes=True, why_not=""))
    assert made.host is not None
    assert made.host.forward_seconds == pytest.approx(0.5)
    assert not made.times_the_host
    for waits in ([True, False], [False, True]):
        behind = timed(passes, waits)
        planning._look_for_host(behind, behind.problem(recomputes=True, why_not=""))
        assert behind.host is None


def test_a_kind_is_not_if_the_thread_had_time_though_the_device_was_waited_for() -> None:
    made = timed([HostPass(0.3, 0.1)] * 2, [True, True])
    planning._look_for_host(made, made.problem(recomputes=True, why_not=""))
    assert made.host is None


def test_whether_the_thread_binds_is_seen_in_passes_that_were_not_queued_before() -> None:
    made = timed([HostPass(0.9, 0.4)] * 2, [True, True])
    made.times.filled(Passed(0.3))
    problem = made.problem(recomputes=True, why_not="")
    assert problem.forward_seconds == 0.3
    planning._look_for_host(made, problem)
    assert made.host is not None


def test_a_kind_without_its_functions_has_what_is_saved_alone() -> None:
    linear, silu = (torch.nn.functional.linear, 1, 8, None, ()), (torch.sigmoid, 0, 8, None, (1,))
    events = (linear, (SAVED, 1, 8, None, ()), silu, (SAVED, 0, 8, None, ()))
    values = [recorded(value(0, 8, "sigmoid", 1)), recorded(value(1, 8, "linear"))]
    made = Kind((*events, (SAVED, 1, 8, None, ())), values).without_functions()
    assert made.events == tuple((SAVED, number, 8, None, ()) for number in (0, 1, 0))
    assert [(one.number, one.operation, one.inputs) for one in made.values] == [
        (0, "linear", ()),
        (1, "sigmoid", ()),
    ]


# --- steps ----------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(3)]
    return nn.Sequential(*layers)


def trained(net: nn.Module, context: object, rows: Sequence[int]) -> list[torch.Tensor]:
    found = []
    for count in rows:
        net.zero_grad()
        with context:  # type: ignore[attr-defined]
            loss = net(torch.linspace(-1, 1, 64 * count).view(count, 64)).square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]
    return found


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> HostBound:
    """Have each kind that is planned be bound by the host, with time for little."""
    found = HostBound(4 * EVENTS)

    def note(kind: Kind, _problem: Problem) -> None:
        kind.host = found

    monkeypatch.setattr(planning, "_look_for_host", note)
    return found


def test_a_step_that_is_bound_by_the_host_lets_most_stay_and_is_not_watched(
    client: storm.Client, bound: HostBound
) -> None:
    rows = [256] * 8 + [128] * 3 + [256] * 2
    plain = trained(network(), nullcontext(), rows)
    net = network()
    offload = client.offload(net, min_bytes=4096)
    assert all(map(torch.equal, plain, trained(net, offload, rows)))
    plan = offload.plan
    assert plan is not None
    assert {row.decision for row in plan.rows} == {"keep", "offload"}
    assert {row.operation for row in plan.rows} >= {"tanh", "layer_norm"}
    assert 0 < plan.host_seconds <= spare_seconds(bound)
    assert "the step is CPU-bound" in str(plan)
    step = offload._planning.begin(
        4096,
        pack=_never,
        unpack=_never,
        publish=_never,
        is_ready=_never,
    )
    assert step.mode is None
    step.abandon()
    stats = offload.stats()
    assert stats.skipped["host"] > 0
    assert stats.offloaded_bytes > 0


def _never(*_: object) -> object:
    raise AssertionError("nothing is saved here")


def test_the_step_behind_the_plan_follows_it(client: storm.Client, bound: HostBound) -> None:
    """The functions of the step before were watched: it would be taken for another."""
    net = network()
    offload = client.offload(net, min_bytes=4096)
    trained(net, offload, [256])
    before = offload.stats()
    trained(net, offload, [256])
    after, plan = offload.stats(), offload.plan
    assert plan is not None
    assert plan.bytes_by_decision["keep"] > 0
    assert after.offloaded_bytes - before.offloaded_bytes == plan.bytes_by_decision["offload"]
