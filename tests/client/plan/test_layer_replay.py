"""Whole layers that are run again: the same bits, or they are left alone, or an exception."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import storm_client as storm
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_client.errors import ActivationLost
from storm_client.plan import layer_replay, layer_trial, planning
from storm_client.plan.kinds import HostBound, Kind
from storm_client.plan.layer_replay import LayerPhase
from support.planning import value
from support.training import Context, assert_identical, gradients
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import dropout, silu
from torch.utils.checkpoint import checkpoint

WIDTH = 64
LAYERS = 4
SETTLED = 9
"""Steps by which layers have been tried and are run again."""


@pytest.fixture(autouse=True)
def bound_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each kind of step be bound by the thread that trains, once it has a plan."""

    def look(kind: Kind, forward_seconds: float | None) -> None:
        if kind.host is None and kind.decisions is not None and forward_seconds:
            kind.host = HostBound(1e-3)

    monkeypatch.setattr(planning, "_look_for_host", look)


class GradientCheckpointingLayer(nn.Module):
    """What declares by its name that it may be run again."""


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


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(0, 900))
def test_no_more_layers_are_taken_than_have_to_be(sizes: list[int], room: int) -> None:
    net = Model(count=len(sizes))
    replay = layer_replay.LayerReplay(planning.Layers([net]), None)
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

    monkeypatch.setattr(layer_trial._RandomStates, "__enter__", without_memory)
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

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(len(args))
        return checkpoint(*args, **options)

    monkeypatch.setattr(layer_replay, "checkpoint", counted)
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
