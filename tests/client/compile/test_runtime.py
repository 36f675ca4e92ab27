"""What the operators do with values: tokens hold them, and what is announced is in order."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.compile import operators, runtime, tokens
from storm_client.compile.runtime import Graph, Target, running
from storm_client.compiled import HANDLED
from support.records import record_of
from support.training import seeded
from support.waiting import wait_until

SECONDS = 30.0


@pytest.fixture
def target(client: storm.Client) -> Target:
    return Target(lambda: client._supply, "least", "ancf", 1)


def stored(target: Target, value: torch.Tensor, *, lent: bool = False) -> torch.Tensor:
    with running(target, None):
        return operators.STORE(value, 0, lent)


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
def test_views_come_back_with_their_strides(turn: object, target: Target) -> None:
    value = turn(seeded("cpu", 64, 64))
    token = stored(target, turn(seeded("cpu", 64, 64)))
    found = waited(token, value)
    assert found.stride() == value.stride()
    assert torch.equal(found, value)
    assert found.data_ptr() % runtime.ALIGNMENT_BYTES == 0


def test_a_value_is_laid_out_as_the_graph_says(target: Target) -> None:
    value = seeded("cpu", 2, 4, 8, 8)
    last = value.contiguous(memory_format=torch.channels_last)
    found = waited(stored(target, last.clone()), value)
    assert found.stride() == value.stride()
    assert torch.equal(found, value)


def test_views_of_one_storage_are_stored_once(target: Target, client: storm.Client) -> None:
    value = seeded("cpu", 64, 64)
    with running(target, None):
        tokens = [operators.STORE(view, 0, False) for view in (value, value.t(), value[3:])]
    assert entries(client) == 1
    assert torch.equal(waited(tokens[2], value[3:]), value[3:])


def test_what_is_lent_leaves_when_nobody_else_holds_it(
    target: Target, client: storm.Client
) -> None:
    value = seeded("cpu", 64, 64)
    token = stored(target, value, lent=True)
    assert entries(client) == 0
    expected = value.clone()
    del value
    wait_until(lambda: entries(client) == 1, SECONDS)
    assert torch.equal(waited(token, expected), expected)


def test_what_is_lent_and_changed_raises(target: Target) -> None:
    value = seeded("cpu", 64, 64)
    token = stored(target, value, lent=True)
    value.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waited(token, value)


def test_parameters_and_leaves_stay(target: Target, client: storm.Client) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    leaf = seeded("cpu", 64, 64, grad=True)
    for value in (parameter, leaf):
        token = stored(target, value, lent=True)
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


def test_a_token_that_was_made_of_nothing_is_named() -> None:
    with pytest.raises(storm.ActivationLost, match="saved-tensor hooks"):
        operators.FETCH(torch.tensor([-1]))


def test_tokens_are_made_on_the_host_whatever_the_default(target: Target) -> None:
    value = seeded("cpu", 64, 64)
    torch.set_default_device("meta")
    try:
        token = stored(target, value)
        assert operators.FETCH(token).device.type == token.device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_what_is_announced_is_looked_at_once_and_in_order(target: Target) -> None:
    token = [stored(target, seeded("cpu", 64, 64).clone()) for _ in range(3)]
    contents = [tokens.TOKENS.content(one) for one in token]
    records = [one._handle.record for one in contents]
    announced = runtime._Announced()
    for record in records:
        announced.add(record)
    assert announced.upcoming() == announced.unseen() == records
    announced.saw(2)
    assert announced.unseen() == records[2:]
    announced.remove(records[0])
    assert announced.upcoming() == records[1:]


def test_what_was_announced_and_died_is_not_kept_for_ever() -> None:
    announced, kept = runtime._Announced(), record_of(torch.zeros(1))
    announced.add(kept)
    for _ in range(10 * runtime.FEW_RECORDS):
        announced.add(record_of(torch.zeros(1)))  # which dies
        announced.saw(2)
        announced.remove(record_of(torch.zeros(1)))
        assert len(announced._records) <= runtime.FEW_RECORDS + 2
        assert announced._seen <= announced._records.keys()
    assert announced.upcoming() == [kept]


def test_the_operators_have_fake_kernels() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        token = operators.STORE(torch.empty(4, 4), 0, False)
        assert operators.FETCH(token).shape == token.shape == (1,)
        found = operators.WAIT(token, [token], [4, 4], [1, 4], torch.half, torch.device("cpu"))
    assert (found.shape, found.stride(), found.dtype) == ((4, 4), (1, 4), torch.half)


# --- what the run before stored -----------------------------------------------------------------


class Fetched:
    """Stands for a stored value, and notes that its fetch has begun."""

    def __init__(self, begun: list[str]) -> None:
        self._begun = begun

    def fetch(self) -> None:
        self._begun.append("early")


@pytest.mark.parametrize(
    ("room", "rooms", "expected"),
    [
        (100, {}, ["begun 1", "begun 0", "early", "brought 1", "brought 0"]),
        (99, {1: 100}, ["begun 1", "begun 0", "brought 1", "early", "brought 0"]),
        (99, {1: 99}, ["begun 1", "begun 0", "brought 1", "brought 0", "early"]),
    ],
)
def test_what_the_run_before_needs_at_once_is_fetched_when_there_is_room_for_it(
    room: int, rooms: dict[int, int], expected: list[str]
) -> None:
    """Behind all that this run fetches, and once in each of its backward passes."""
    nothing: Any = None
    events: list[str] = []
    value = Fetched(events)
    before = runtime.Trail(Graph(nothing, nothing, {}, early=(7,), early_bytes=100), None)
    before.note(7, value)  # type: ignore[arg-type]
    graph = Graph(nothing, nothing, {}, order=(1, 0), last_fetched=0, room=room, rooms=rooms)
    trail = runtime.Trail(graph, weakref.ref(before))
    for _ in range(2):
        events.clear()
        for what, number in (("begun", 1), ("begun", 0), ("brought", 1), ("brought", 0)):
            events.append(f"{what} {number}")
            (trail.has_begun if what == "begun" else trail.has_brought)(number)
        assert events == expected
