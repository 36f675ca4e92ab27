"""What the operators do with values: tokens hold them, and what is announced is in order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.compile import operators, runtime
from storm_client.compile.announced import FEW_RECORDS, Announced
from storm_client.compile.graph import Graph
from storm_client.compile.runtime import running
from storm_client.compile.schedule import Schedule
from storm_client.compile.stored import Trail
from storm_client.compile.target import Target
from storm_client.monitoring.compiled_models import HANDLED
from storm_client.transport import frames
from support.daemon_thread import DaemonThread
from support.in_place_lane import InPlaceCpuLane
from support.records import record_of
from support.training import seeded
from support.waiting import wait_until

from stormd.protocol import RESTORE_FIELDS, Envelope, Message, RestoreParts

SECONDS = 60.0


@pytest.fixture
def target(client: storm.Client) -> Target:
    return Target(lambda: client._supply, "least", "ancf", 1)


def stored(target: Target, value: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
    with running(target, graph_of(1)):
        return operators.STORE(value, 0, shared)


def graph_of(values: int) -> Graph:
    """Return what a run needs to know if it stores so many values and keeps none."""
    nothing: Any = None
    schedule = Schedule((), (0,), (0,), (), nothing)
    return Graph(nothing, schedule, {}, (), tuple(reversed(range(values))))


def waited(token: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    begun = [operators.FETCH(token)]
    shape = like.size(), like.stride(), like.dtype, like.device
    return operators.WAIT(token, begun, *shape)


def entries(client: storm.Client) -> int:
    client._supply.sessions.settle(SECONDS)
    return client.status().entries


def test_a_value_comes_back_from_the_daemon(
    device: str, target: Target, client: storm.Client
) -> None:
    expected = seeded(device, 64, 64)
    token = stored(target, expected.clone())
    assert entries(client) == 1
    assert (token.dtype, token.shape, token.device.type) == (torch.int64, (1,), "cpu")
    for _ in range(2):  # as with retain_graph
        assert torch.equal(waited(token, expected), expected)
    assert target.recorder.snapshot().offloaded_bytes == expected.nbytes


def test_any_alias_of_a_token_holds_its_value(target: Target, client: storm.Client) -> None:
    value = seeded("cpu", 64, 64)
    token = stored(target, value.clone())
    alias = token.detach().view(1, 1)
    del token
    gc.collect()
    assert torch.equal(waited(alias, value), value)
    assert entries(client) == 1
    del alias
    wait_until(lambda: entries(client) == 0, SECONDS)


@pytest.mark.parametrize("turn", [torch.t, lambda x: x[:, 3:40], lambda x: x[1:, 1:].t()])
def test_values_come_back_laid_out_as_the_graph_says(turn: object, target: Target) -> None:
    value = turn(seeded("cpu", 64, 64))
    token = stored(target, turn(seeded("cpu", 64, 64)))
    for like in (value, value.contiguous()):
        found = waited(token, like)
        assert found.stride() == like.stride()
        assert torch.equal(found, value)
        assert found.data_ptr() % runtime.ALIGNMENT_BYTES == 0


def test_what_is_lent_leaves_when_nobody_else_holds_it(
    target: Target, client: storm.Client
) -> None:
    value = seeded("cpu", 64, 64)
    token = stored(target, value, shared=True)
    assert entries(client) == 0
    expected = value.clone()
    del value
    wait_until(lambda: entries(client) == 1, SECONDS)
    assert torch.equal(waited(token, expected), expected)


def test_parameters_and_leaves_stay(target: Target, client: storm.Client) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    leaf = seeded("cpu", 64, 64, grad=True)
    for value in (parameter, leaf):
        token = stored(target, value, shared=True)
        assert waited(token, value).data_ptr() == value.data_ptr()
    assert target.recorder.snapshot().skipped == {"parameter": 1, "leaf": 1}
    assert entries(client) == 0


def test_an_interrupt_leaves_no_graph_running(target: Target) -> None:
    def interrupted() -> None:
        with running(target, None):
            assert HANDLED.depth == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert HANDLED.depth == 0
    with pytest.raises(AssertionError, match="without it"):
        operators.STORE(seeded("cpu", 4), 0, False)


def test_tokens_are_made_on_the_host_whatever_the_default(target: Target) -> None:
    value = seeded("cpu", 64, 64)
    torch.set_default_device("meta")
    try:
        token = stored(target, value)
        assert operators.FETCH(token).device.type == token.device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_what_was_announced_and_died_is_not_kept_for_ever() -> None:
    announced, kept = Announced(), record_of(torch.zeros(1))
    announced.add(kept)
    for _ in range(10 * FEW_RECORDS):
        announced.add(record_of(torch.zeros(1)))  # which dies
        announced.saw(2)
        announced.remove(record_of(torch.zeros(1)))
        assert len(announced._records) <= FEW_RECORDS + 2
        assert announced._seen <= announced._records.keys()
    assert announced.upcoming() == [kept]


# --- what the run before stored -----------------------------------------------------------------


class Fetched:
    """Stands for a stored value, and notes that its fetch has begun."""

    def __init__(self, begun: list[str]) -> None:
        self._begun = begun

    def fetch(self) -> None:
        self._begun.append("early")


@pytest.mark.parametrize(
    ("free_bytes", "free_bytes_from", "expected"),
    [
        (100, {}, ["begun 1", "begun 0", "early", "brought 1", "brought 0"]),
        (99, {1: 100}, ["begun 1", "begun 0", "brought 1", "early", "brought 0"]),
        (99, {1: 99}, ["begun 1", "begun 0", "brought 1", "brought 0", "early"]),
    ],
)
def test_what_the_run_before_needs_at_once_is_fetched_when_there_is_room_for_it(
    free_bytes: int, free_bytes_from: dict[int, int], expected: list[str]
) -> None:
    """Behind all that this run fetches, and once in each of its backward passes."""
    nothing: Any = None
    events: list[str] = []
    value = Fetched(events)
    before = Trail(Graph(nothing, nothing, {}, early=(7,), early_bytes=100), None)
    before.note(7, value)  # type: ignore[arg-type]
    graph = Graph(
        nothing,
        nothing,
        {},
        order=(1, 0),
        last_fetched=0,
        free_bytes=free_bytes,
        free_bytes_from=free_bytes_from,
    )
    trail = Trail(graph, weakref.ref(before))
    for _ in range(2):
        events.clear()
        for what, number in (("begun", 1), ("begun", 0), ("brought", 1), ("brought", 0)):
            events.append(f"{what} {number}")
            (trail.has_begun if what == "begun" else trail.has_restored)(number)
        assert events == expected


# --- runs of a graph ----------------------------------------------------------------------------

VALUES = 6
SIDE = 64


class Driven:
    """A graph without code: a test stores its values and waits for them."""

    def __init__(self, client: storm.Client, codec: str = "ancf") -> None:
        self.target = Target(lambda: client._supply, "least", codec, 1)
        self.graph = graph_of(VALUES)
        self.target.graphs.append(self.graph)

    def forward(self, device: str, seed: int, size: int = SIDE) -> list[torch.Tensor]:
        """Store values and return their tokens."""
        with running(self.target, self.graph):
            return [
                operators.STORE(self.value(device, seed, n, size), n, False) for n in range(VALUES)
            ]

    def backward(
        self, device: str, seed: int, tokens: list[torch.Tensor], size: int = SIDE
    ) -> None:
        """Wait for the values, the last first, and compare their bits."""
        for n in reversed(range(VALUES)):
            value = self.value(device, seed, n, size)
            assert torch.equal(waited(tokens[n], value), value)

    def step(self, device: str, seed: int, size: int = SIDE) -> None:
        self.backward(device, seed, self.forward(device, seed, size), size)

    @staticmethod
    def value(device: str, seed: int, number: int, size: int) -> torch.Tensor:
        return seeded(device, size, SIDE) * (100 * seed + number)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """What clients have said to their daemons since the test began."""
    messages: list[Message] = []
    encode = frames.encode

    def noted(batch: list[Envelope]) -> bytes:
        messages.extend(one.message for one in batch)
        return encode(batch)

    monkeypatch.setattr(frames, "encode", noted)
    return messages


def settled(client: storm.Client) -> tuple[int, int]:
    """Return the entries and the promised bytes of the daemon when nothing is in flight."""
    client._supply.sessions.settle(SECONDS)
    state = client.status()
    return state.entries, state.details["pool"]["promised_bytes"]


def test_all_that_a_staging_area_has_room_for_is_asked_for_at_once(
    client: storm.Client, said: list[Message]
) -> None:
    driven = Driven(client)
    made = driven.forward("cpu", 1)
    assert settled(client) == (VALUES, 0)
    said.clear()
    driven.backward("cpu", 1, made)
    [asked] = [one for one in said if isinstance(one, RestoreParts)]
    assert len(asked.places) == 8 * RESTORE_FIELDS * VALUES


@pytest.mark.parametrize("is_reversed", [False, True])
def test_two_runs_may_be_live(device: str, client: storm.Client, is_reversed: bool) -> None:
    driven = Driven(client)
    for _ in range(3):
        live = [(seed, driven.forward(device, seed)) for seed in (5, 6)]
        for seed, made in reversed(live) if is_reversed else live:
            driven.backward(device, seed, made)


def test_an_exception_in_a_run_leaves_nothing(client: storm.Client) -> None:
    driven = Driven(client)

    def fail() -> None:
        with running(driven.target, driven.graph):
            operators.STORE(driven.value("cpu", 3, 0, SIDE), 0, False)
            raise ValueError("the graph failed")

    with pytest.raises(ValueError, match="the graph failed"):
        fail()
    wait_until(lambda: settled(client) == (0, 0), SECONDS)
    driven.step("cpu", 4)


@pytest.mark.parametrize("pool_bytes", [64 << 20, 1 << 20])
def test_memory_that_was_let_go_of_had_been_read(
    make_late_daemon: Callable[..., DaemonThread], lanes: list[InPlaceCpuLane], pool_bytes: int
) -> None:
    """The daemon reads as late as it may, and freed memory is overwritten."""
    daemon = make_late_daemon(pool_bytes=pool_bytes)
    with storm.connect(daemon.address, embedded="never", timeout=SECONDS) as client:
        driven, size = Driven(client), 2048  # 3 MiB in all: more than is held back
        for seed in range(4):
            driven.step("cpu", seed, size)
        live = [(seed, driven.forward("cpu", seed, size)) for seed in (8, 9)]
        for seed, made in live:
            driven.backward("cpu", seed, made, size)
        del made, live
        assert lanes[0].in_place is not None
        if pool_bytes > 1 << 20:
            assert driven.target.recorder.snapshot().offloaded_bytes > 0
