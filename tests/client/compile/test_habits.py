"""Static plans of compiled graphs: learned from runs, used by the next, and given up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client import connection
from storm_client.compile import backend, operators
from storm_client.compile.habits import Habit
from storm_client.compile.runtime import Graph, Target, running
from storm_client.compile.schedule import Schedule
from storm_client.runs import PlannedValue, StaticPlan
from support.daemon_process import DaemonProcess
from support.daemon_thread import DaemonThread
from support.in_place_lane import InPlaceCpuLane
from support.training import seeded
from support.waiting import wait_until

from stormd.protocol import (
    EndRun,
    Envelope,
    ForgetPlan,
    Message,
    RegisterPlan,
    RestoreParts,
    RunPlan,
    Store,
    StoreParts,
)

SECONDS = 30.0
VALUES = 6
SIDE = 64


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """What clients have said to their daemons since the test began."""
    messages: list[Message] = []
    encode = connection.encode

    def noted(batch: list[Envelope]) -> bytes:
        messages.extend(one.message for one in batch)
        return encode(batch)

    monkeypatch.setattr(connection, "encode", noted)
    return messages


class Driven:
    """A graph without code: a test stores its values and waits for them."""

    def __init__(self, client: storm.Client, codec: str = "ancf") -> None:
        self.client = client
        self.target = Target(lambda: client._supply, "least", codec, 1)
        nothing: Any = None
        schedule = Schedule((), (0,), (0,), (), nothing)
        self.graph = Graph(nothing, schedule, {}, (), tuple(reversed(range(VALUES))))
        self.target.graphs.append(self.graph)

    def forward(
        self, device: str, seed: int, sizes: tuple[int, ...] = (SIDE,) * VALUES
    ) -> list[torch.Tensor]:
        """Store values and return their tokens."""
        with running(self.target, self.graph):
            return [
                operators.STORE(self.value(device, seed, n, size), n, False)
                for n, size in enumerate(sizes)
            ]

    def backward(
        self,
        device: str,
        seed: int,
        tokens: list[torch.Tensor],
        sizes: tuple[int, ...] = (SIDE,) * VALUES,
    ) -> None:
        """Wait for the values, the last first, and compare their bits."""
        for n in reversed(range(len(tokens))):
            value = self.value(device, seed, n, sizes[n])
            begun = [operators.FETCH(tokens[n])]
            shape = value.size(), value.stride(), value.dtype, value.device
            assert torch.equal(operators.WAIT(tokens[n], begun, *shape), value)

    def step(self, device: str, seed: int, sizes: tuple[int, ...] = (SIDE,) * VALUES) -> None:
        tokens = self.forward(device, seed, sizes)
        self.backward(device, seed, tokens, sizes)

    def learn(self, device: str) -> None:
        """Make two runs that are alike, and have the daemon know the plan of them."""
        self.step(device, 1)
        self.step(device, 2)
        wait_until(lambda: self.is_planned, SECONDS)

    @property
    def is_planned(self) -> bool:
        plans = [habit.plan for habit in self.habits]
        return any(plan is not None and plan.is_registered for plan in plans)

    @property
    def habits(self) -> list[Habit]:
        return [known.habit for known in self.target._habits.values()]

    @staticmethod
    def value(device: str, seed: int, number: int, size: int) -> torch.Tensor:
        return seeded(device, size, SIDE) * (100 * seed + number)


def settled(client: storm.Client) -> tuple[int, int]:
    """Return the entries and the promised bytes of the daemon when nothing is under way."""
    client._supply.sessions.settle(SECONDS)
    state = client.status()
    return state.entries, state.details["pool"]["promised_bytes"]


def kinds(said: list[Message], *of: type[Message]) -> list[type[Message]]:
    found = [type(one) for one in said if isinstance(one, of)]
    said.clear()
    return found


# --- what is learned ----------------------------------------------------------------------------


def test_what_two_runs_store_alike_is_planned_and_the_next_says_places(
    device: str, client: storm.Client, said: list[Message]
) -> None:
    driven = Driven(client)
    driven.learn(device)
    [plan] = [one for one in said if isinstance(one, RegisterPlan)]
    assert plan.sizes == [SIDE * SIDE * 4] * VALUES
    assert (plan.dtypes, plan.codec) == (["float32"], "ancf")
    said.clear()
    for seed in (3, 4):
        driven.step(device, seed)
    wait_until(lambda: [type(one) for one in said].count(EndRun) == 2, SECONDS)
    stores = [one for one in said if isinstance(one, Store | StoreParts)]
    assert all(isinstance(one, StoreParts) for one in stores)
    assert sum(len(one.places) // 40 for one in stores if isinstance(one, StoreParts)) == 2 * VALUES
    assert kinds(said, RegisterPlan, RunPlan, EndRun, ForgetPlan) == [RunPlan, EndRun] * 2


def test_all_that_a_staging_area_has_room_for_is_asked_for_at_once(
    client: storm.Client, said: list[Message]
) -> None:
    driven = Driven(client)
    tokens = driven.forward("cpu", 1)
    assert settled(client) == (VALUES, 0)
    said.clear()
    driven.backward("cpu", 1, tokens)
    [asked] = [one for one in said if isinstance(one, RestoreParts)]
    assert len(asked.places) == 48 * VALUES


def test_other_sizes_are_stored_without_a_plan_and_then_planned(
    client: storm.Client, said: list[Message]
) -> None:
    driven, longer = Driven(client), (96,) * VALUES
    driven.learn("cpu")
    said.clear()
    driven.step("cpu", 3, longer)
    assert set(kinds(said, Store, StoreParts)) == {Store}
    driven.step("cpu", 4, longer)
    wait_until(lambda: ForgetPlan in [type(one) for one in said], SECONDS)
    wait_until(lambda: driven.is_planned, SECONDS)
    said.clear()
    driven.step("cpu", 5, longer)
    assert set(kinds(said, Store, StoreParts)) == {StoreParts}


def test_shapes_that_take_turns_do_not_change_the_plan(
    client: storm.Client, said: list[Message]
) -> None:
    driven = Driven(client)
    driven.learn("cpu")
    said.clear()
    for seed in range(3):
        driven.step("cpu", seed, (96,) * VALUES)
        driven.step("cpu", seed)
    assert kinds(said, RegisterPlan, ForgetPlan) == []


def test_a_run_that_stores_less_is_in_the_plan(client: storm.Client, said: list[Message]) -> None:
    driven = Driven(client)
    driven.learn("cpu")
    said.clear()
    for seed in range(3):
        driven.step("cpu", seed, (SIDE,) * 3)
    assert set(kinds(said, Store, StoreParts, RegisterPlan)) == {StoreParts}
    assert settled(client) == (0, 0), "what was promised for the rest is given back"


def test_a_value_larger_than_a_plan_can_be_is_left_out() -> None:
    values = [PlannedValue(1, 700, "uint8"), PlannedValue(2, 700, "uint8")]
    plan = StaticPlan(1, values, "raw", part_bytes=1)
    assert plan.first(values[0]) == 0
    assert plan.first(values[1]) is None
    assert plan.covers(values)
    assert not plan.covers([PlannedValue(3, 1, "uint8")])


def test_a_plan_is_forgotten_with_its_target(client: storm.Client, said: list[Message]) -> None:
    driven = Driven(client)
    driven.learn("cpu")
    del driven
    gc.collect()
    wait_until(lambda: ForgetPlan in [type(one) for one in said], SECONDS)
    wait_until(lambda: client.status().details["sessions"][0]["static_plans"] == 0, SECONDS)


# --- what becomes of runs -----------------------------------------------------------------------


@pytest.mark.parametrize("is_reversed", [False, True])
def test_two_runs_may_be_live(device: str, client: storm.Client, is_reversed: bool) -> None:
    driven = Driven(client)
    driven.learn(device)
    for _ in range(3):
        live = [(seed, driven.forward(device, seed)) for seed in (5, 6)]
        for seed, tokens in reversed(live) if is_reversed else live:
            driven.backward(device, seed, tokens)


def test_a_backward_pass_may_run_twice(device: str, client: storm.Client) -> None:
    driven = Driven(client)
    driven.learn(device)
    tokens = driven.forward(device, 3)
    for _ in range(2):
        driven.backward(device, 3, tokens)


def test_a_forward_without_a_backward_leaves_nothing(client: storm.Client) -> None:
    driven = Driven(client)
    driven.learn("cpu")
    for _ in range(3):
        driven.forward("cpu", 3)
    gc.collect()
    wait_until(lambda: settled(client) == (0, 0), SECONDS)


def test_an_exception_in_a_run_gives_back_what_it_was_promised(
    client: storm.Client, said: list[Message]
) -> None:
    driven = Driven(client)
    driven.learn("cpu")
    said.clear()

    def fail() -> None:
        with running(driven.target, driven.graph):
            operators.STORE(driven.value("cpu", 3, 0, SIDE), 0, False)
            raise ValueError("the graph failed")

    with pytest.raises(ValueError, match="the graph failed"):
        fail()
    wait_until(lambda: settled(client) == (0, 0), SECONDS)
    assert kinds(said, RunPlan, EndRun) == [RunPlan, EndRun]
    driven.step("cpu", 4)
    assert driven.is_planned


def test_a_run_that_nobody_ended_is_over_with_its_owner(client: storm.Client) -> None:
    """As after an interrupt at the worst moment."""
    driven = Driven(client)
    driven.learn("cpu")
    session = client._supply.sessions.of(torch.device("cpu"))
    assert session is not None
    [habit] = driven.habits
    assert habit.plan is not None
    owner = Driven(client)
    run = session.begin_run(habit.plan, owner)
    assert run is not None
    with session.connection.lock:
        session.connection.flush()
    wait_until(lambda: client.status().details["pool"]["promised_bytes"] > 0, SECONDS)
    del owner
    wait_until(lambda: settled(client) == (0, 0), SECONDS)


def test_a_pool_without_room_leaves_values_where_they_are(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon("--pool-bytes", "1MiB")
    with storm.connect(daemon.address, embedded="never", timeout=SECONDS) as client:
        driven = Driven(client, codec="raw")
        for seed in range(6):
            driven.step("cpu", seed, (1024,) * VALUES)  # 256 KiB each
        wait_until(lambda: settled(client) == (0, 0), SECONDS)
        stats = driven.target.recorder.snapshot()
        assert stats.kept["pool_full"] > 0
        assert stats.offloaded_bytes > 0


def test_a_daemon_that_refuses_a_plan_stores_as_without(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch, said: list[Message]
) -> None:
    monkeypatch.setattr("storm_client.transfers.codec_name", lambda dtype: "float32")
    driven = Driven(client)
    session_part = 1 << 40  # larger than the daemon takes
    driven.forward("cpu", 1)
    session = client._supply.sessions.of(torch.device("cpu"))
    assert session is not None
    monkeypatch.setattr(session.transfers.runs, "_part_bytes", session_part)
    plan = session.register([PlannedValue(0, 1 << 30, "float32")], "raw")
    assert plan is not None
    with session.connection.lock:
        session.connection.flush()
    client.status()
    assert session.begin_run(plan, driven) is None


def test_a_client_that_is_closed_has_no_plans(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    with storm.connect(daemon.address, embedded="never", timeout=SECONDS) as client:
        driven = Driven(client)
        driven.learn("cpu")
        session = client._supply.sessions.of(torch.device("cpu"))
        assert session is not None
        [habit] = driven.habits
        assert habit.plan is not None
        run = session.begin_run(habit.plan, driven)
        assert run is not None
    session.end_run(run)
    assert session.begin_run(habit.plan, driven) is None
    assert session.register([PlannedValue(0, 1, "uint8")], "raw") is None


# --- in graphs ----------------------------------------------------------------------------------


def test_gradients_are_the_same_bits_under_a_plan(
    device: str, client: storm.Client, said: list[Message]
) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x * torch.rand_like(x)  # which nothing can make again
        return x

    def gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        call(leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    x = seeded(device, 128, 128)
    compiled = storm.compile(noisy, client=client, budget=0.0, min_bytes=1, codegen="eager")
    expected = gradient(compiled)
    target = backend._target_of(compiled)
    for _ in range(2):
        assert torch.equal(gradient(compiled), expected)
    wait_until(
        lambda: any(
            known.habit.plan is not None and known.habit.plan.is_registered
            for known in target._habits.values()
        ),
        SECONDS,
    )
    said.clear()
    assert torch.equal(gradient(compiled), expected)
    assert set(kinds(said, Store, StoreParts)) == {StoreParts}
    assert torch.equal(gradient(torch.compile(noisy, backend="aot_eager")), expected)


def test_what_is_known_of_a_graph_that_is_dropped_goes(client: storm.Client) -> None:
    """A captured step has some graphs for a while, and then others."""
    driven = Driven(client)
    driven.learn("cpu")
    first = driven.graph
    driven.graph = Graph(first.plan, first.schedule, {}, (), first.order)
    driven.target.graphs[:] = [driven.graph]
    driven.step("cpu", 3)
    assert [known.graph for known in driven.target._habits.values()] == [driven.graph]
    assert not driven.is_planned


# --- from where values lie ----------------------------------------------------------------------


@pytest.mark.parametrize("pool_bytes", [64 << 20, 1 << 20])
def test_memory_that_was_let_go_of_had_been_read(
    make_late_daemon: Callable[..., DaemonThread],
    lanes: list[InPlaceCpuLane],
    said: list[Message],
    pool_bytes: int,
) -> None:
    """The daemon reads as late as it may, and freed memory is overwritten."""
    daemon = make_late_daemon(pool_bytes=pool_bytes)
    with storm.connect(daemon.address, embedded="never", timeout=SECONDS) as client:
        driven, sizes = Driven(client), (2048,) * VALUES  # 3 MiB: more than is held back
        for seed in (1, 2):
            driven.step("cpu", seed, sizes)
        wait_until(lambda: driven.is_planned, SECONDS)
        said.clear()
        for seed in range(3, 7):
            driven.step("cpu", seed, sizes)
        live = [(seed, driven.forward("cpu", seed, sizes)) for seed in (8, 9)]
        for seed, tokens in live:
            driven.backward("cpu", seed, tokens, sizes)
        del tokens, live
        assert lanes[0].in_place is not None
        assert StoreParts in kinds(said, Store, StoreParts)
        if pool_bytes > 1 << 20:
            assert driven.target.recorder.snapshot().offloaded_bytes > 0
