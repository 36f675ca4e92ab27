"""Whole layers that are run again: the same bits, or they are left alone, or an exception."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import storm_client as storm
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_client.errors import ActivationLost
from storm_client.plan import (
    layer_call,
    layer_cut,
    layer_replay,
    layer_state,
    layer_trial,
    pace,
    planning,
)
from storm_client.plan.kinds import HostBound, Kind
from storm_client.plan.layer_replay import LayerPhase
from support.altering_modes import ALTERING
from support.called_layers import GradientCheckpointingLayer, have_steps_bound_by_the_thread
from support.planning import value
from support.thread_counts import one_thread_more
from support.training import Context, assert_identical, gradients
from support.waiting import wait_until
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, rrelu, silu
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

WIDTH = 64
LAYERS = 4
SETTLED = 9
"""Steps by which layers have been tried and are run again."""


@pytest.fixture(autouse=True)
def bound_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    have_steps_bound_by_the_thread(monkeypatch)


@pytest.fixture(autouse=True, params=["with graphs", "without graphs"])
def leaves_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether calls that may be made again leave graphs, as where one node cannot stand for one."""
    leaves: bool = request.param == "with graphs"
    if leaves:
        monkeypatch.setattr(layer_cut.LayerCalls, "need_no_graphs", lambda _: None)
    return leaves


class Layer(GradientCheckpointingLayer):
    """A norm, two products and a residual sum, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        h = dropout(silu(self.up(self.norm(x))), 0.1, self.training)
        return x + self.down(h) * scale


class Model(nn.Module):
    """Some layers, called one after another."""

    def __init__(self, kind: type[nn.Module] = Layer, count: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **options)
        return x


def made(kind: type[nn.Module] = Layer, count: int = LAYERS) -> Model:
    torch.manual_seed(0)
    return Model(kind, count)


def step(net: nn.Module, x: Tensor, context: Context, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    with context():
        loss = net(x, **options).square().mean()
    loss.backward()
    return [loss.detach().clone(), *(gradient.clone() for gradient in gradients(net))]


def settle(net: nn.Module, x: Tensor, offload: storm.Offload, **options: Any) -> None:
    """Train without a difference for as long as it takes until layers are run again, or not."""
    expected = step(net, x, nullcontext, **options)
    for _ in range(SETTLED):
        assert_identical(step(net, x, lambda: offload, **options), expected)


def phase(offload: storm.Offload) -> LayerPhase:
    return offload._planning._layer_replay.phase


def refusal(offload: storm.Offload) -> str:
    return offload._planning._layer_replay.refusal


def run_again(offload: storm.Offload) -> list[str]:
    """Return the names of the layers that the plan runs again."""
    assert offload.plan is not None
    return [row.operation for row in offload.plan.rows if row.operation.startswith("layers.")]


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(16, WIDTH)


def test_all_layers_are_run_again_and_nothing_of_them_stays(
    client: storm.Client, x: Tensor
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON
    assert run_again(offload) == [f"layers.{number}" for number in range(LAYERS)]
    before = offload.stats()
    expected = step(net, x, nullcontext)
    assert_identical(step(net, x, lambda: offload), expected)
    after = offload.stats()
    replayed = after.replayed_bytes - before.replayed_bytes
    assert replayed > 0.8 * (after.saved_bytes - before.saved_bytes)
    assert after.replay_seconds > before.replay_seconds
    assert "the layer is run again" in str(offload.plan)


def test_a_budget_has_the_first_ones_run_again(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1, budget=0.5)
    settle(net, x, offload)
    assert run_again(offload) == ["layers.0", "layers.1"]


class CalledByName(Model):
    """Adds a parameter, which saves nothing, and gives layers what is not saved then."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        x = x + self.shift
        for layer in self.layers:
            x = layer(x=x)
        return x


def test_a_step_that_saves_nothing_outside_of_its_layers(client: storm.Client, x: Tensor) -> None:
    torch.manual_seed(0)
    net = CalledByName()
    offload = client.offload(net, min_bytes=1, budget=0.1)

    def train(context: Context) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        with context():
            made = net(x)
        loss = made.square().mean()
        loss.backward()
        return [loss.detach().clone(), *(gradient.clone() for gradient in gradients(net))]

    expected = train(nullcontext)
    for _ in range(2 * SETTLED):
        assert_identical(train(lambda: offload), expected)
    assert phase(offload) is LayerPhase.ON


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(0, 900))
def test_no_more_layers_are_taken_than_have_to_be(sizes: list[int], room: int) -> None:
    net = Model(count=len(sizes))
    replay = layer_replay.LayerReplay(planning.Layers([net]), None, pace.Pace())
    values = []
    for number, nbytes in enumerate(sizes):
        one = value(number, nbytes)
        one.layer = f"layers.{number}"
        values.append(one)
    replay.consider(Kind((), values), HostBound(1.0), room)
    taken = len(replay._layers)
    leaving = sum(sizes) - room
    assert sum(sizes[:taken]) >= leaving
    assert taken == 0 or sum(sizes[: taken - 1]) < leaving


def test_layers_are_called_once_where_offload_has_taken_the_thread_little(
    client: storm.Client, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(kind: Kind, forward_seconds: float | None) -> None:
        if kind.host is None and forward_seconds:
            # A later pass may take longer, where the machine is busy.
            kind.host = HostBound(10.0 * forward_seconds)

    monkeypatch.setattr(planning, "_look_for_host", look)
    net = made(Layer)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.OFF
    assert offload.stats().offloaded_bytes > 0


def test_layers_are_run_again_no_more_where_steps_take_longer(
    client: storm.Client, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread is spared the device may take, which computes all of a layer twice."""
    monkeypatch.setattr(layer_replay, "SLOWER", 0.0)  # whatever they take is too much
    monkeypatch.setattr(pace, "STEPS", 2)
    net = made()
    offload = client.offload(net, min_bytes=1)
    for _ in range(4):
        settle(net, x, offload)
    assert phase(offload) is LayerPhase.REFUSED
    assert refusal(offload).startswith("layers are not run again: with that a step took ")
    assert refusal(offload) in str(offload.plan)
    assert not run_again(offload)


def test_nothing_of_the_second_call_is_left(client: storm.Client, x: Tensor) -> None:
    made_so_far: list[StorageWeakRef] = []

    class Noting(Layer):
        def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
            y = super().forward(x, scale).tanh()  # which saves its own result
            made_so_far.append(StorageWeakRef(y.untyped_storage()))
            return y

    net = made(Noting)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON
    gc.collect()
    assert all(storage.expired() for storage in made_so_far)


def test_other_layers_are_run_again_if_they_are_named(client: storm.Client, x: Tensor) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer.__new__(Layer)
            Layer.__init__(self.inner)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.inner(x)
            return made

    net = made(Plain)
    unnamed = client.offload(net, min_bytes=1)
    settle(net, x, unnamed)
    assert phase(unnamed) is LayerPhase.OFF
    named = client.offload(net, min_bytes=1, layers=net.layers)
    settle(net, x, named)
    assert run_again(named) == [f"layers.{number}" for number in range(LAYERS)]


@pytest.mark.parametrize("options", [{"layers": []}, {"verify": "always"}, {"replay": False}])
def test_it_can_be_switched_off(client: storm.Client, x: Tensor, options: dict[str, Any]) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1, **options)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.OFF


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda _: [3], r"layers has int 3; pass layers of the model"),
        (lambda _: "layers", r"layers has str 'layers'; pass layers"),
        (lambda net: net.layers[0].up, r"layers has a Linear that is not an item"),
        (lambda _: [Layer()], r"layers has a Layer that is not an item"),
        (lambda net: [net.layers], r"layers has a ModuleList that is not an item"),
    ],
)
def test_what_is_no_layer_is_refused(
    client: storm.Client, layers: Callable[[Model], Any], message: str
) -> None:
    net = made()
    with pytest.raises(storm.errors.UsageError, match=message):
        client.offload(net, layers=layers(net))


def test_a_single_layer_may_be_named(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1, layers=[net.layers[2]])
    settle(net, x, offload)
    assert run_again(offload) == ["layers.2"]


# --- layers that do not do the same twice ---------------------------------------------------------


class Counting(Layer):
    calls = 0

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        self.calls += 1
        return super().forward(x, scale)


class Alternating(Layer):
    """Is after two calls as it was."""

    is_odd = False

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        self.is_odd = not self.is_odd
        return super().forward(x, scale)


class Collecting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        self.means.append(x.detach().mean())
        return super().forward(x, scale)


class Averaging(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        made: Tensor = self.batch(super().forward(x, scale))
        return made


class Restless(Layer):
    """What it makes depends on what nobody sees."""

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        NUMBERS.append(0)
        return super().forward(x, scale) * (1 + 0 * len(NUMBERS)) + PARITY[len(NUMBERS) % 2]


NUMBERS: list[int] = []
PARITY = torch.zeros(2)


class Once(Layer):
    """Cannot be called a second time in a row."""

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        if LAST and LAST[0] is self:
            raise ValueError("called twice")
        LAST[:] = [self]
        return super().forward(x, scale)


LAST: list[nn.Module] = []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counting, "changes what its modules hold"),
        (Alternating, "changes what its modules hold"),
        (Collecting, "changes what its modules hold"),
        (Averaging, "changes what its modules hold"),
        (Once, "its second call failed: ValueError: called twice"),
    ],
)
def test_a_layer_that_does_not_do_the_same_twice_is_left_alone(
    client: storm.Client, x: Tensor, kind: type[Layer], reason: str
) -> None:
    net = made(kind)
    offload = client.offload(net, min_bytes=1)
    expected = step(net, x, nullcontext)
    for _ in range(SETTLED):
        LAST.clear()
        assert_identical(step(net, x, lambda: offload), expected)
    assert phase(offload) is LayerPhase.REFUSED
    assert reason in refusal(offload)
    assert refusal(offload) in str(offload.plan)
    assert run_again(offload) == []


def test_a_layer_with_other_bits_the_second_time_is_left_alone(
    client: storm.Client, x: Tensor
) -> None:
    net = made(Restless)
    offload = client.offload(net, min_bytes=1)
    try:
        PARITY[1] = 1e-3
        for _ in range(SETTLED):
            step(net, x, lambda: offload)
    finally:
        PARITY.zero_()
    assert phase(offload) is LayerPhase.REFUSED
    assert "other bits" in refusal(offload)


def test_no_memory_for_a_second_call_is_no_error(
    client: storm.Client, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(self: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(layer_trial.RandomStates, "again", without_memory)
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert "none left" in refusal(offload)


class Cache:
    """What counts how often it was written to."""

    entries = 0


class Caching(Layer):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:  # type: ignore[override]
        if cache is not None:
            cache.entries += 1
        return super().forward(x)


def test_what_could_be_written_to_is_passed_on_as_it_is(client: storm.Client, x: Tensor) -> None:
    net, cache = made(Caching), Cache()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON
    step(net, x, lambda: offload, cache=cache)
    assert cache.entries == LAYERS
    replayed = offload.stats().replayed_bytes
    assert_identical(step(net, x, lambda: offload), step(net, x, nullcontext))
    assert offload.stats().replayed_bytes > replayed


def test_a_block_inside_of_a_block_leaves_the_outer_one_its_layers(
    client: storm.Client, x: Tensor
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with offload:
        with offload:
            pass
        before = offload.stats().replayed_bytes
        net(x)
    assert offload.stats().replayed_bytes > before


def test_who_is_always_given_a_cache_is_told_so(client: storm.Client, x: Tensor) -> None:
    net, cache = made(Caching), Cache()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload, cache=cache)
    assert cache.entries == LAYERS * (SETTLED + 1)
    assert phase(offload) is LayerPhase.REFUSED
    assert "it is given a Cache" in refusal(offload)
    assert "use_cache = False" in str(offload.plan)


def test_layers_that_pass_are_run_again_beside_one_that_does_not(
    client: storm.Client, x: Tensor
) -> None:
    net = made()
    net.layers[1] = Counting()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert run_again(offload) == ["layers.0", "layers.2", "layers.3"]
    assert "layers.1 is not run again" in str(offload.plan)


def test_a_watched_part_is_not_called_twice(client: storm.Client, x: Tensor) -> None:
    net, seen = made(), []
    net.layers[1].up.register_forward_hook(lambda *_: seen.append(0))
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert run_again(offload) == ["layers.0", "layers.2", "layers.3"]
    assert len(seen) == SETTLED + 1


# --- changes before the backward pass -------------------------------------------------------------


def change_parameter(net: Model) -> None:
    with torch.no_grad():
        net.layers[2].up.weight.mul_(2)


def change_mode(net: Model) -> None:
    net.layers[2].eval()


def replace_parameter(net: Model) -> None:
    net.layers[2].down.weight = nn.Parameter(torch.zeros_like(net.layers[2].down.weight))


@pytest.mark.parametrize("change", [change_parameter, change_mode, replace_parameter])
def test_a_layer_that_has_changed_is_not_run_again(
    client: storm.Client, x: Tensor, change: Callable[[Model], None]
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with offload:
        loss = net(x).square().mean()
    change(net)
    with pytest.raises(ActivationLost, match=r"layers\.2 was changed between"):
        loss.backward()


@pytest.mark.parametrize("name", ["scale", "x"])
def test_a_tensor_that_it_was_given_and_that_has_changed_raises(
    client: storm.Client, x: Tensor, name: str
) -> None:
    net, scale = made(), torch.ones(WIDTH)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload, scale=scale)
    assert phase(offload) is LayerPhase.ON
    with offload:
        loss = net(x, scale=scale).square().mean()
    {"scale": scale, "x": x}[name].mul_(2)
    with pytest.raises(
        (ActivationLost, RuntimeError), match=r"changed in place|by an inplace operation"
    ):
        loss.backward()


# --- when it ends, and where it does nothing ------------------------------------------------------


def test_much_larger_inputs_are_learned_anew(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    large = torch.randn(64, WIDTH)
    expected = step(net, large, nullcontext)
    for _ in range(2):
        assert_identical(step(net, large, lambda: offload), expected)
    assert phase(offload) is LayerPhase.OFF
    settle(net, large, offload)
    assert phase(offload) is LayerPhase.ON


def test_forwards_are_as_they_were_outside_of_blocks(client: storm.Client, x: Tensor) -> None:
    net = made()
    own = net.layers[0].forward
    net.layers[0].forward = own  # as others have theirs stand there
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert net.layers[0].__dict__["forward"] is own
    assert "forward" not in net.layers[1].__dict__
    with pytest.raises(RuntimeError, match="shape"), offload:
        net(x.T)
    assert "forward" not in net.layers[1].__dict__
    del net.layers[0].forward
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert_identical(step(copied, x, nullcontext), step(net, x, nullcontext))


def test_other_threads_and_inner_hooks_have_layers_as_they_are(
    client: storm.Client, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    calls: list[int] = []

    def counted(*args: Any) -> layer_state.CallState:
        calls.append(len(args))
        return layer_state.CallState(*args)

    monkeypatch.setattr(layer_replay, "CallState", counted)
    with offload:
        thread = threading.Thread(target=net, args=(x,))
        thread.start()
        thread.join()
        with torch.no_grad():
            net(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            net(x)
        net.eval()
        net(x)
        net.train()
        assert not calls
        net(x)
        assert len(calls) == LAYERS


def test_two_threads_train_at_once(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    barrier = threading.Barrier(2, timeout=30)
    errors: list[BaseException] = []
    inputs = [torch.randn(16, WIDTH, requires_grad=True) for _ in range(2)]

    def train(own: Tensor) -> None:
        try:
            for _ in range(3):
                barrier.wait()
                with offload:
                    loss = net(own).square().mean()
                barrier.wait()
                torch.autograd.grad(loss, own)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=train, args=(own,)) for own in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert "forward" not in net.layers[0].__dict__


def test_a_graph_may_be_used_twice(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    expected = step(net, x, nullcontext)
    torch.manual_seed(1)
    with offload:
        loss = net(x).square().mean()
    for _ in range(2):
        net.zero_grad()
        loss.backward(retain_graph=True)
        assert_identical([loss.detach(), *gradients(net)], expected)


class Asking(torch.autograd.Function):
    """Doubles, and asks twice for what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


class Squared(Layer):
    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        made: Tensor = Asking.apply(self.down(silu(self.up(x))))
        return x + made * scale


def test_what_is_saved_may_be_asked_for_twice(client: storm.Client, x: Tensor) -> None:
    net = made(Squared)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON


def test_gradients_of_gradients(client: storm.Client, x: Tensor, leaves_graphs: bool) -> None:
    if not leaves_graphs:
        pytest.skip("test_layer_cut.py has what becomes of them")
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)

    def penalty(context: Context) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        given = x.clone().requires_grad_()
        with context():
            loss = net(given).square().mean()
        (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
        gradient.square().sum().backward()
        return [gradient.detach(), *gradients(net)]

    assert_identical(penalty(lambda: offload), penalty(nullcontext))
    assert phase(offload) is LayerPhase.ON


def test_forward_mode_differentiation(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)

    def tangent(context: Context) -> Tensor:
        torch.manual_seed(1)
        with forward_ad.dual_level():
            given = forward_ad.make_dual(x, torch.ones_like(x))
            with context():
                found = forward_ad.unpack_dual(net(given)).tangent
        assert found is not None
        return found.detach()

    assert_identical([tangent(lambda: offload)], [tangent(nullcontext)])
    assert phase(offload) is LayerPhase.ON


def test_gradients_of_tangents_are_asked_for_later(client: storm.Client, x: Tensor) -> None:
    """When no forward differentiation is under way any more."""
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)

    def train(context: Context) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        with context(), forward_ad.dual_level():
            found = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
            assert found.tangent is not None
            loss = found.primal.square().mean() + found.tangent.square().mean()
        loss.backward()
        return [loss.detach(), *gradients(net)]

    expected = [one.clone() for one in train(nullcontext)]
    assert_identical(train(lambda: offload), expected)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON


class Spread(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("elsewhere", torch.empty(1, device="meta"))


def test_layers_on_several_devices_are_left_alone(client: storm.Client, x: Tensor) -> None:
    net = made(Spread)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.REFUSED
    assert "on several devices" in refusal(offload)


def test_tensors_are_made_where_the_forward_pass_has_made_them(
    client: storm.Client, x: Tensor
) -> None:
    seen: list[str] = []

    class Making(Layer):
        def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
            seen.append(torch.empty(1).device.type)
            return super().forward(x, scale)

    net = made(Making)
    offload = client.offload(net, min_bytes=1)
    with torch.device("meta"):
        settle(net, x, offload)
        assert phase(offload) is LayerPhase.ON
        with offload:
            loss = net(x).square().mean()
    seen.clear()
    loss.backward()
    assert seen == LAYERS * ["meta"]


def test_a_layer_that_saves_other_tensors_raises(client: storm.Client, x: Tensor) -> None:
    rows = [slice(None)]

    class Chosen(Layer):
        def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
            return super().forward(x[rows[0]], scale)

    net = made(Chosen)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with offload:
        loss = net(x).square().mean()
    rows[0] = slice(3)
    with pytest.raises(ActivationLost, match="did not do what it did"):
        loss.backward()
    rows[0] = slice(None)
    settle(net, x, offload)


def test_what_is_made_again_is_freed_with_its_use(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with offload:
        loss = net(x).square().mean()
    living = weakref.WeakSet(living_calls())
    assert len(living) == LAYERS
    loss.backward()
    assert not living  # though the loss is held


# --- what changes after the trial -----------------------------------------------------------------


def differs_nowhere(
    kind: Callable[[], nn.Module],
    client: storm.Client,
    x: Tensor,
    *,
    train: Callable[[nn.Module, Tensor, Context, int], list[Tensor]],
    steps: int = 2 * SETTLED,
) -> storm.Offload:
    """Train one with offload beside one without; return what offloads."""
    plain, net = kind(), kind()
    offload = client.offload(net, min_bytes=1)
    for number in range(steps):
        expected = train(plain, x, nullcontext, number)
        assert_identical(train(net, x, lambda: offload, number), expected)
        assert_identical(net.buffers(), plain.buffers())
    return offload


class Frozen(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return super().forward(self.batch(x), scale)


def test_a_part_that_trains_from_some_step_on(client: storm.Client, x: Tensor) -> None:
    def train(net: Any, x: Tensor, context: Context, number: int) -> list[Tensor]:
        for layer in net.layers:
            layer.batch.train(number >= SETTLED)
        return step(net, x, context)

    offload = differs_nowhere(lambda: made(Frozen), client, x, train=train)
    assert phase(offload) is LayerPhase.REFUSED


def test_a_part_that_is_put_in_later(client: storm.Client, x: Tensor) -> None:
    def train(net: Any, x: Tensor, context: Context, number: int) -> list[Tensor]:
        if number == SETTLED:
            for layer in net.layers:
                layer.down = nn.Sequential(layer.down, nn.BatchNorm1d(WIDTH))
        return step(net, x, context)

    offload = differs_nowhere(made, client, x, train=train)
    assert phase(offload) is LayerPhase.REFUSED


@pytest.mark.parametrize("is_for_all", [False, True])
def test_hooks_that_are_registered_later_are_called_once(
    client: storm.Client, x: Tensor, is_for_all: bool
) -> None:
    net, seen = made(), []
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON
    part = net.layers[1].up

    def see(module: nn.Module, *_: object) -> None:
        seen.extend([0] * (module is part))

    registers = register_module_forward_hook if is_for_all else part.register_forward_hook
    removed = registers(see)
    try:
        for count in range(1, 2 * SETTLED):
            step(net, x, lambda: offload)
            assert len(seen) == count
    finally:
        removed.remove()


class Timed(Layer):
    time = 0

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return super().forward(x * (1 + self.time), scale)


def test_an_attribute_that_is_set_for_each_call(client: storm.Client, x: Tensor) -> None:
    class Recurrent(Model):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            for time in range(3):
                for layer in self.layers:
                    layer.time = time
                x = super().forward(x, **options)
            return x

    def train(net: Any, x: Tensor, context: Context, number: int) -> list[Tensor]:
        return step(net, x, context)

    def new() -> nn.Module:
        torch.manual_seed(0)
        return Recurrent(Timed, 2)

    offload = differs_nowhere(new, client, x, train=train)
    assert "is set anew between its calls" in refusal(offload)


class Masked(Layer):
    mask: Tensor | None = None

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        assert self.mask is not None
        return super().forward(x * self.mask, scale)


def test_an_attribute_that_is_set_for_each_of_two_forwards(client: storm.Client, x: Tensor) -> None:
    def train(net: Any, x: Tensor, context: Context, number: int) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        losses = []
        for threshold in (0.0, 0.5):
            for layer in net.layers:
                layer.mask = (x > threshold).float()
            with context():
                losses.append(net(x).square().mean())
        sum(losses[1:], losses[0]).backward()
        return [losses[1].detach(), *gradients(net)]

    offload = differs_nowhere(lambda: made(Masked), client, x, train=train)
    assert "is set anew between its calls" in refusal(offload)
    assert phase(offload) is not LayerPhase.ON


class Shifted(Layer):
    """Adds what it is given by name."""

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + shift)


@pytest.mark.parametrize("which", ["parameter", "input", "input by name"])
def test_other_data_before_the_backward_pass_raises(
    which: str, client: storm.Client, x: Tensor
) -> None:
    """No version counts it; without offload what was computed from the first data is saved."""
    net, shift = made(Shifted), torch.ones(WIDTH)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload, shift=shift)
    given = x + 1
    with offload:
        loss = net(given, shift=shift).square().mean()
    changed = {"parameter": net.layers[2].norm.weight, "input": given, "input by name": shift}
    changed[which].data = changed[which].data * 2  # type: ignore[union-attr]
    with pytest.raises(ActivationLost, match="changed"):
        loss.backward()


def test_an_attribute_that_is_set_before_the_backward_pass_raises(
    client: storm.Client, x: Tensor
) -> None:
    net = made(Timed)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with offload:
        loss = net(x).square().mean()
    net.layers[2].time = 1
    with pytest.raises(ActivationLost, match=r"layers\.2 was changed .*attribute 'time'"):
        loss.backward()


@pytest.mark.parametrize("setting", [lambda: sdpa_kernel(SDPBackend.MATH), one_thread_more])
def test_settings_that_are_others_in_the_backward_pass_raise(
    setting: Callable[[], AbstractContextManager[object]], client: storm.Client, x: Tensor
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with setting(), offload:
        loss = net(x).square().mean()
    with pytest.raises(ActivationLost, match=r"settings of PyTorch .*layers\.3"):
        loss.backward()


def test_layers_whose_backward_pass_has_other_settings_are_not_run_again(
    client: storm.Client, x: Tensor
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)

    @contextmanager
    def chosen() -> Iterator[None]:
        with sdpa_kernel(SDPBackend.MATH), offload:
            yield

    expected = step(net, x, nullcontext)
    for _ in range(2 * SETTLED):
        assert_identical(step(net, x, chosen), expected)
    assert "settings of PyTorch" in refusal(offload)
    assert phase(offload) is LayerPhase.REFUSED


@pytest.mark.parametrize("mode", ALTERING)
@pytest.mark.parametrize("is_inside", [False, True])
def test_layers_are_called_once_where_a_mode_may_alter_what_they_do(
    mode: Callable[[], AbstractContextManager[object]],
    is_inside: bool,
    client: storm.Client,
    x: Tensor,
) -> None:
    """The backward pass, outside of that mode, would have them do something else."""
    net = made()
    offload = client.offload(net, min_bytes=1)

    @contextmanager
    def altered() -> Iterator[None]:
        with ExitStack() as stack:
            for one in (offload, mode()) if is_inside else (mode(), offload):
                stack.enter_context(one)
            yield

    settle(net, x, offload)
    expected = step(net, x, mode)
    for _ in range(SETTLED):
        assert_identical(step(net, x, altered), expected)
    settle(net, x, offload)


@pytest.mark.parametrize("mode", ALTERING)
def test_modes_of_the_backward_pass_alter_no_call_of_a_layer(
    mode: Callable[[], AbstractContextManager[object]], client: storm.Client, x: Tensor
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    expected = step(net, x, nullcontext)
    torch.manual_seed(1)
    net.zero_grad()
    with offload:
        loss = net(x).square().mean()
    with mode():
        loss.backward()
    assert_identical([loss.detach(), *gradients(net)], expected)
    assert phase(offload) is LayerPhase.ON


class Normed(Layer):
    """Has a weight that is computed of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.up)


def test_layers_are_called_once_where_computed_weights_are_kept(
    client: storm.Client, x: Tensor
) -> None:
    """Nobody keeps them in the backward pass, and the loss uses those of the forward pass."""
    net = made(Normed)
    offload = client.offload(net, min_bytes=1)

    def train(context: Context) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        with context(), parametrize.cached():
            loss = net(x).square().mean()
            for layer in net.layers:
                loss = loss + layer.up.weight.square().mean()  # type: ignore[union-attr]
        loss.backward()
        return [loss.detach().clone(), *(gradient.clone() for gradient in gradients(net))]

    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON
    expected = train(nullcontext)
    for _ in range(SETTLED):
        assert_identical(train(lambda: offload), expected)
    settle(net, x, offload)


class Masking(Layer):
    """Adds what it is given, which autograd does not save for that."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + mask


def test_a_mask_from_inference_mode_is_not_saved(client: storm.Client, x: Tensor) -> None:
    with torch.inference_mode():
        mask = torch.ones(16, WIDTH)

    class Masked(Model):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            for layer in self.layers:
                x = layer(x, options.get("mask", mask))
            return x

    torch.manual_seed(0)
    net = Masked(Masking)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload, mask=torch.ones(16, WIDTH))
    assert phase(offload) is LayerPhase.ON
    settle(net, x, offload)


class Filling(Layer):
    """Ends with an operation that saves memory which it fills only then."""

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return rrelu(self.norm(x) * scale, training=self.training)


def test_what_is_filled_behind_its_save_is_filled_again(client: storm.Client, x: Tensor) -> None:
    net = made(Filling)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON


class Unsteady(Layer):
    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return super().forward(x, scale).tanh() if PARITY[0] else super().forward(x, scale)


def test_a_layer_that_saves_something_else_is_named(
    client: storm.Client, x: Tensor, leaves_graphs: bool
) -> None:
    if not leaves_graphs:
        pytest.skip("nothing tells what the forward pass would have saved")
    net = made(Unsteady)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    try:
        PARITY[0] = 1
        with offload:
            loss = net(x).square().mean()
        PARITY[0] = 0
        with pytest.raises(ActivationLost, match=r"layers\.3.*did not do.*layers=\[\]"):
            loss.backward()
    finally:
        PARITY.zero_()


class Fails(Frozen):
    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        y = super().forward(x, scale)
        if FAILS and FAILS[0]():
            FAILS.clear()
            raise MemoryError
        return y


FAILS: list[Callable[[], bool]] = []


def test_a_trial_whose_call_fails_has_shown_nothing(client: storm.Client, x: Tensor) -> None:
    net = made(Fails)
    offload = client.offload(net, min_bytes=1)
    FAILS[:] = [lambda: phase(offload) is LayerPhase.TRIED]
    for _ in range(2 * SETTLED):
        with suppress(MemoryError):
            step(net, x, lambda: offload)
    assert not FAILS
    assert phase(offload) is LayerPhase.REFUSED


# --- what layers are given ------------------------------------------------------------------------


class Reading(Layer):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:  # type: ignore[override]
        while not isinstance(given, Tensor):
            given = given[-1]
        return super().forward(x + given)


@pytest.mark.parametrize("wraps", [lambda given: given, lambda given: (given,)])
@pytest.mark.parametrize("by_name", [False, True])
def test_lists_that_grow_behind_a_call_are_as_they_were(
    client: storm.Client, x: Tensor, wraps: Callable[[Any], Any], by_name: bool
) -> None:
    class Skipping(Model):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            outputs = [x]
            for layer in self.layers:
                given = wraps(outputs)
                x = layer(x, given=given) if by_name else layer(x, given)
                outputs.append(x)
            return x

    torch.manual_seed(0)
    net = Skipping(Reading)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON


class Attention(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made: Tensor = self.attention(query, key, value, need_weights=False)[0]
        return query + made


@pytest.mark.parametrize("by_name", [False, True])
def test_one_tensor_that_is_given_thrice_is_one_again(
    client: storm.Client, x: Tensor, by_name: bool
) -> None:
    class SelfAttention(Model):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            x = x[:, None]
            for layer in self.layers:
                x = layer(x, key=x, value=x) if by_name else layer(x, x, x)
            return x

    torch.manual_seed(0)
    net = SelfAttention(Attention)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON


def test_random_numbers_are_of_the_devices_of_what_is_given_by_name_too(
    client: storm.Client, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    seen: list[Tensor] = []

    class Looking(layer_state.RandomStates):
        def __init__(self, tensors: tuple[Tensor, ...]) -> None:
            seen.extend(tensors)
            super().__init__(tensors)

    monkeypatch.setattr(layer_state, "RandomStates", Looking)
    with offload:
        net.layers[0](x=x)
    assert any(tensor is x for tensor in seen)


class Written(GradientCheckpointingLayer):
    """Saves nothing that its caller writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear((x * 2).relu())
        return made


def test_what_is_written_to_behind_a_call_is_found_in_the_trial(
    client: storm.Client, x: Tensor
) -> None:
    class InPlace(Model):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            x = x * 1
            for layer in self.layers:
                x += layer(x)
            return x

    torch.manual_seed(0)
    net = InPlace(Written)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert "changed in place behind its call" in refusal(offload)


# --- who else looks at forwards -------------------------------------------------------------------


def test_copies_made_in_a_block_are_of_the_model_as_it_is(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    signature = inspect.signature(net.layers[0].forward)
    expected = step(net, x, nullcontext)
    with offload:
        copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        assert inspect.signature(net.layers[0].forward) == signature
        assert net.layers[0].forward.__name__ == "forward"
    for one in copies:
        assert_identical(step(one, x, nullcontext), expected)
        assert one.layers[0].forward.__self__ is one.layers[0]


def test_a_forward_that_is_wrapped_in_a_block(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with offload:
        before = net.layers[0].forward
        net.layers[0].forward = lambda x: before(x) * 1.5
    assert_identical(step(net, x, lambda: offload), step(net, x, nullcontext))
    settle(net, x, offload)
    net.layers[0].forward = before
    settle(net, x, offload)
    assert "forward" not in net.layers[0].__dict__


def test_two_offloads_whose_blocks_overlap(client: storm.Client, x: Tensor) -> None:
    net = made()
    offloads = [client.offload(net, min_bytes=1) for _ in range(2)]
    for one in offloads:
        settle(net, x, one)
    one, other = offloads
    entered, left = threading.Event(), threading.Event()

    def overlap() -> None:
        entered.wait(30)
        with other:
            entered.clear()
            left.wait(30)

    thread = threading.Thread(target=overlap)
    thread.start()
    with one:
        entered.set()
        wait_until(lambda: not entered.is_set(), 30, lambda: "the other block has not begun")
    left.set()
    thread.join()
    for _ in range(2):
        for each in offloads:
            assert_identical(step(net, x, lambda each=each: each), step(net, x, nullcontext))
    assert "forward" not in net.layers[0].__dict__


def test_a_layer_that_is_replaced_is_not_kept(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    weight = weakref.ref(net.layers[1].up.weight)
    net.layers[1] = Layer()
    settle(net, x, offload)
    gc.collect()
    assert weight() is None


def test_layers_under_a_transform_are_left_alone(client: storm.Client, x: Tensor) -> None:
    class Mapped(Model):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            for layer in self.layers:
                x = torch.vmap(layer)(x)
            return x

    torch.manual_seed(0)
    net = Mapped(Written)
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.TRIED


def test_what_is_compiled_later_is_left_alone(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    net.layers[0].compile(backend="eager")
    step(net, x, lambda: offload)
    assert phase(offload) is LayerPhase.OFF


def test_layers_that_are_scripts_are_left_alone(client: storm.Client, x: Tensor) -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch\.jit"):  # from 2.14 on
        net = nn.Sequential(*(torch.jit.trace(Written(), x) for _ in range(2)))
    offload = client.offload(net, min_bytes=1, layers=list(net))
    for _ in range(SETTLED):
        step(net, x, lambda: offload)
    assert phase(offload) is LayerPhase.OFF


# --- steps without hooks --------------------------------------------------------------------------


def living_calls() -> list[layer_state.CallState]:
    return [one for one in gc.get_objects() if isinstance(one, layer_state.CallState)]


def unwatch(net: nn.Module, x: Tensor, offload: storm.Offload) -> None:
    """Train without a difference until steps have no hooks."""
    expected = step(net, x, nullcontext)
    for _ in range(SETTLED + 2 * planning.ALIKE):
        if not offload._planning.unwatched_steps:
            assert_identical(step(net, x, lambda: offload), expected)
    assert offload._planning.unwatched_steps == 1


@pytest.mark.parametrize(("budget", "count"), [("least", LAYERS), (0.6, LAYERS // 2)])
def test_most_steps_have_no_hooks_where_all_stays_outside_of_layers(
    client: storm.Client, x: Tensor, budget: str | float, count: int
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1, budget=budget)
    unwatch(net, x, offload)
    expected, hooks = step(net, x, nullcontext), []

    def context() -> Any:
        return block

    @contextmanager
    def counting() -> Iterator[None]:
        with offload:
            hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
            yield
        assert len(living_calls()) == count

    for _ in range(2 * planning.UNWATCHED):
        block = counting()
        assert_identical(step(net, x, context), expected)
    assert phase(offload) is LayerPhase.ON
    assert sum(one is not None for one in hooks) in {1, 2}
    assert "forward" not in net.layers[0].__dict__


def test_with_a_budget_of_bytes_each_step_is_watched(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1, budget=1 << 20)
    for _ in range(SETTLED + 2 * planning.ALIKE):
        step(net, x, lambda: offload)
    assert not offload._planning.unwatched_steps


def test_larger_inputs_are_watched_again(client: storm.Client, x: Tensor) -> None:
    net, larger = made(), torch.cat(3 * [x])
    offload = client.offload(net, min_bytes=1)
    unwatch(net, x, offload)
    before = offload._planning.unwatched_steps
    expected = step(net, larger, nullcontext)
    for _ in range(SETTLED):
        assert_identical(step(net, larger, lambda: offload), expected)
    assert offload._planning.unwatched_steps == before + 1
    assert phase(offload) is LayerPhase.ON


def test_what_changes_in_a_step_without_hooks_raises(client: storm.Client, x: Tensor) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    unwatch(net, x, offload)
    with offload:
        loss = net(x).square().mean()
    with torch.no_grad():
        net.layers[1].up.weight.mul_(2)
    with pytest.raises(ActivationLost, match="was changed between the forward"):
        loss.backward()
    given = x.clone()
    with offload:
        loss = net(given).square().mean()
    given.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_exception_in_a_step_without_hooks_leaves_layers_as_they_were(
    client: storm.Client, x: Tensor
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    unwatch(net, x, offload)
    with pytest.raises(RuntimeError, match="normalized_shape"), offload:
        net(x[:, 1:])
    assert "forward" not in net.layers[0].__dict__
    assert offload._planning._row is None
    settle(net, x, offload)


def test_hooks_inside_of_a_block_without_any_have_layers_as_they_are(
    client: storm.Client, x: Tensor
) -> None:
    net, seen = made(), []
    offload = client.offload(net, min_bytes=1)
    unwatch(net, x, offload)
    with (
        offload,
        torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(0) or t, lambda t: t),
    ):
        loss = net(x).square().mean()
    assert not living_calls()
    loss.backward()
    assert len(seen) > LAYERS


# --- interrupts -----------------------------------------------------------------------------------


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def stacks() -> Iterator[None]:
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["_Checksums", "_Unseen", "saved_tensors_hooks"])
def test_an_interrupt_in_a_trial_leaves_nothing_on(
    client: storm.Client, x: Tensor, monkeypatch: pytest.MonkeyPatch, stacks: None, name: str
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    interrupted = type(name, (getattr(layer_trial, name),), {"__exit__": interrupt})
    with monkeypatch.context() as patches:
        patches.setattr(layer_trial, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            settle(net, x, offload)
    settle(net, x, offload)
    assert phase(offload) is LayerPhase.ON


@contextmanager
def interrupted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have an interrupt come as the surroundings of a call or a later one are left."""
    hooks = type("Hooks", (layer_call.saved_tensors_hooks,), {"__exit__": interrupt})
    with monkeypatch.context() as patches:
        patches.setattr(layer_call, "saved_tensors_hooks", hooks)
        patches.setattr(layer_cut, "uncached_casts", lambda: hooks(id, id))
        patches.setattr(layer_cut, "_unhooked", lambda: hooks(id, id))
        yield


def test_an_interrupt_in_a_call_leaves_nothing_on(
    client: storm.Client, x: Tensor, monkeypatch: pytest.MonkeyPatch, stacks: None
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with interrupted_calls(monkeypatch), pytest.raises(KeyboardInterrupt):
        step(net, x, lambda: offload)
    settle(net, x, offload)


def test_an_interrupt_in_a_later_call_leaves_nothing_on(
    client: storm.Client, x: Tensor, monkeypatch: pytest.MonkeyPatch, stacks: None
) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1)
    settle(net, x, offload)
    with offload:
        loss = net(x).square().mean()
    with interrupted_calls(monkeypatch), pytest.raises(KeyboardInterrupt):
        loss.backward()
    settle(net, x, offload)


# --- models that nobody here wrote ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("llama", {"use_cache": False}, LayerPhase.ON),
        ("llama", {}, LayerPhase.REFUSED),  # each layer is given a cache
        ("bert", {}, LayerPhase.ON),
        ("t5", {}, LayerPhase.ON),  # of its encoder
        ("vit", {}, LayerPhase.ON),
        ("wav2vec2", {}, LayerPhase.ON),
        ("resnet", {}, LayerPhase.OFF),
    ],
)
@pytest.mark.parametrize("is_cast", [False, True], ids=["float32", "autocast"])
def test_models_of_transformers(
    client: storm.Client, name: str, options: dict[str, Any], expected: LayerPhase, is_cast: bool
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from support.small_models import MODELS

    net, inputs = MODELS[name]()
    net.train()

    def train(context: Context) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        with context(), torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss = net(**inputs, **options).loss
        loss.backward()
        return [loss.detach().clone(), *(gradient.clone() for gradient in gradients(net))]

    offload = client.offload(net, min_bytes=1)
    plain = train(nullcontext)
    for _ in range(SETTLED):
        assert_identical(train(lambda: offload), plain)
    assert phase(offload) is expected
