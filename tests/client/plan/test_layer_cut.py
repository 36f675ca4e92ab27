"""Calls of layers that leave no graph: each sum of gradients has the bits that it has with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.errors import ActivationLost
from storm_client.plan.layer_cut import CutCall
from storm_client.plan.layer_replay import LayerPhase
from support.called_layers import GradientCheckpointingLayer, have_steps_bound_by_the_thread
from support.training import Context, assert_identical
from torch import Tensor, nn
from torch.nn.functional import dropout, silu

WIDTH = 32
LATEST = 60
"""Steps by which layers have been tried, and are called again if they ever are."""


@pytest.fixture(autouse=True)
def bound_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    have_steps_bound_by_the_thread(monkeypatch)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layers that were called without a graph, in their order."""
    names: list[str] = []
    call = CutCall.__call__

    def noted(self: CutCall, arguments: Any) -> Any:
        names.append(self._state._name)
        return call(self, arguments)

    monkeypatch.setattr(CutCall, "__call__", noted)
    return names


class Layer(GradientCheckpointingLayer):
    """Uses what it is given four times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = dropout(silu(self.up(self.norm(x))), 0.1, self.training)
        return x + self.down(h) * x.tanh() * x


class Decoder(Layer):
    """Uses another thing twice, by name, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, states: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        scores = (super().forward(x) @ self.key(states).mT).softmax(-1)
        return x + scores @ self.value(states), None


class Twice(Layer):
    """Uses one of its parameters in two products and a sum."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        return super().forward(x) + silu(x @ weight.mT) @ weight + weight.sum()


class Halves(Layer):
    """Is given two results of one operation."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * y + y.sin() + x.cos()


class Experts(Layer):
    """Has parts that some steps alone use."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        chosen = int(x.detach().sum().item() * 1e3) % 3
        return h + silu(self.experts[chosen](h))


class Mixture(Layer):
    """Uses one parameter as often as it has experts for what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        chosen = (h.detach().sum(-1) * 1e2).long() % (1 + int(x[0, 0, 0].detach()) % 4)
        made = torch.zeros_like(h)
        for number in chosen.unique().tolist():
            rows = torch.where(chosen == number)
            made = made.index_put(rows, (h[rows] @ self.experts[number]).to(h.dtype))
        return h + made


def plainly(layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    found = [x]
    for layer in layers:
        found.append(layer(found[-1]))
    return found


def last(net: Any, x: Tensor) -> Tensor:
    return plainly(net, x)[-1].square().mean()


def all_states(net: Any, x: Tensor) -> Tensor:
    """Use what is between layers before, between and behind their own uses of it."""
    early = (x * 3).sum() * 1e-3
    found = plainly(net, x)
    return early + sum(
        ((one * 2 + k).square().mean() for k, one in enumerate(found)), torch.zeros(())
    )


def shared_states(net: Any, x: Tensor) -> Tensor:
    states, h = (x * 2).tanh(), x
    before = states.square().sum()
    for layer in net:
        h, _ = layer(h, states=states)
    return h.square().mean() + before * 1e-2 + states.sin().sum()


def with_weights(net: Any, x: Tensor) -> Tensor:
    """Have the loss depend on parameters otherwise too."""
    decay = sum((one.square().sum() for one in net.parameters()), torch.zeros(()))
    return last(net, x) + 1e-2 * decay


def halves(net: Any, x: Tensor) -> Tensor:
    h = x
    for layer in net:
        one, other = (h * 1.5).repeat(1, 1, 2).split(WIDTH, -1)
        h = layer(one, other) + other
    return h.square().mean()


def step(
    net: nn.Module, x: Tensor, loss: Callable[..., Tensor], context: Context, dtype: Any = None
) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    x = x.detach().requires_grad_()
    cast = torch.autocast(x.device.type, dtype) if dtype is not None else nullcontext()
    with context(), cast:
        value = loss(net, x * 1)
    value.backward()
    found = [value.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]
    return [torch.zeros(()) if one is None else one.clone() for one in found]


def layers_of(kind: type[nn.Module], count: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(kind() for _ in range(count))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(2, 8, WIDTH)


PROGRAMS = [
    (Layer, last),
    (Layer, all_states),
    (Layer, with_weights),
    (Decoder, shared_states),
    (Twice, last),
    (Twice, with_weights),
    (Halves, halves),
    (Experts, all_states),
    (Mixture, last),
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize(("kind", "loss"), PROGRAMS)
def test_all_sums_have_their_bits(
    client: storm.Client,
    x: Tensor,
    cuts: list[str],
    kind: type[nn.Module],
    loss: Callable[..., Tensor],
    dtype: torch.dtype | None,
    device: str,
) -> None:
    x = x.to(device)
    plain, net = layers_of(kind).to(device), layers_of(kind).to(device)
    offload = client.offload(net, min_bytes=1)
    numbers = count()

    def train() -> None:
        given = x + next(numbers) % 8 * 0.1
        expected = step(plain, given, loss, nullcontext, dtype)
        assert_identical(step(net, given, loss, lambda: offload, dtype), expected)

    train_until_on(offload, train)
    for _ in range(12):
        train()
    assert set(cuts) == {"0", "1", "2"}


def settled(
    client: storm.Client, net: nn.ModuleList, x: Tensor, loss: Callable[..., Tensor] = last
) -> storm.Offload:
    """Return an Offload of layers whose calls leave no graphs any more."""
    offload = client.offload(net, min_bytes=1)
    train_until_on(offload, lambda: step(net, x, loss, lambda: offload))
    return offload


def train_until_on(offload: storm.Offload, train: Callable[[], object]) -> None:
    """Do steps until layers are called again, and some more."""
    for _ in range(LATEST):
        if offload._planning._layer_replay.phase is LayerPhase.ON:
            break
        train()
    assert offload._planning._layer_replay.phase is LayerPhase.ON
    for _ in range(3):
        train()


def test_calls_within_a_block_that_has_its_backward_pass_in_it(
    client: storm.Client, x: Tensor, cuts: list[str]
) -> None:
    plain, net = layers_of(Layer), layers_of(Layer)
    offload = settled(client, net, x)
    for is_cast in (False, True):
        with ExitStack() as held:
            if is_cast:
                held.enter_context(torch.autocast("cpu", torch.bfloat16))
            for _ in range(6):
                found = []
                for one, context in ((plain, nullcontext()), (net, offload)):
                    torch.manual_seed(1)
                    one.zero_grad()
                    with context:
                        last(one, x).backward()
                    found.append([parameter.grad for parameter in one.parameters()])
                assert_identical(found[1], found[0])
    assert len(cuts) > 20


def test_lengths_that_vary_are_each_learned(
    client: storm.Client, x: Tensor, cuts: list[str]
) -> None:
    class Chunked(Layer):
        """Uses its parameters once for each four rows."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super(Chunked, self).forward(one) for one in x.split(4, 1)], 1)

    plain, net = layers_of(Chunked), layers_of(Chunked)
    offload = settled(client, net, x)
    for length in (3, 5, 8, 5, 3, 8, 5, 3):
        given = x[:, :length]
        expected = step(plain, given, with_weights, nullcontext)
        assert_identical(step(net, given, with_weights, lambda: offload), expected)
    assert len(cuts) >= 5 * 3


class FrozenLast(Halves):
    """Its last parameter needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * self.scale


@pytest.mark.parametrize("kind", [Halves, FrozenLast])
def test_two_tensors_and_one_that_is_given_twice_in_turns(
    client: storm.Client, x: Tensor, cuts: list[str], kind: type[nn.Module]
) -> None:
    plain, net = layers_of(kind), layers_of(kind)
    offload = client.offload(net, min_bytes=1)
    numbers = count()

    def loss(layers: Any, x: Tensor, *, is_one: bool) -> Tensor:
        h = x
        for layer in layers:
            one, other = (h * 1.5).repeat(1, 1, 2).split(WIDTH, -1)
            h = layer(one, one if is_one else other) + other
        return h.square().mean()

    def train() -> None:
        program = partial(loss, is_one=next(numbers) % 3 == 2)
        assert_identical(
            step(net, x, program, lambda: offload), step(plain, x, program, nullcontext)
        )

    train_until_on(offload, train)
    for _ in range(12):
        train()
    assert set(cuts) == {"0", "1", "2"}


def test_parameters_that_train_in_some_steps_alone(
    client: storm.Client, x: Tensor, cuts: list[str]
) -> None:
    plain, net = layers_of(Twice), layers_of(Twice)
    offload = settled(client, net, x)
    before = len(cuts)
    for number in range(6):
        for one in (plain, net):
            one[1].up.weight.requires_grad_(number % 2 == 0)
            one[2].requires_grad_(number % 3 == 0)
        expected = step(plain, x, with_weights, nullcontext)
        assert_identical(step(net, x, with_weights, lambda: offload), expected)
    assert len(cuts) > before


def test_hooks_of_parameters_are_called_once(client: storm.Client, x: Tensor) -> None:
    """Both that of a gradient and those behind it, which may update the parameter."""

    def train(net: Any, context: Context) -> list[Any]:
        seen: list[Any] = []

        def scaled(gradient: Tensor) -> Tensor:
            seen.append(float(gradient.sum()))
            return gradient * 1.5

        def update(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.data -= 0.1 * parameter.grad
            seen.append(float(parameter.detach().sum()))

        handles = [net[1].up.weight.register_hook(scaled)]
        handles += [one.register_post_accumulate_grad_hook(update) for one in net.parameters()]
        found = step(net, x, last, context)
        for handle in handles:
            handle.remove()
        return [seen, *found]

    plain, net = layers_of(Layer), layers_of(Layer)
    offload = settled(client, net, x)
    for _ in range(3):
        expected, found = train(plain, nullcontext), train(net, lambda: offload)
        assert sorted(found[0]) == sorted(expected[0])
        assert_identical(found[1:], expected[1:])


def test_some_gradients_and_a_graph_that_is_used_twice(
    client: storm.Client, x: Tensor, cuts: list[str]
) -> None:
    def train(net: Any, context: Context) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        given = x.clone().requires_grad_()
        with context():
            loss = all_states(net, given)
        found = [*torch.autograd.grad(loss, [given, net[1].norm.weight], retain_graph=True)]
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return [*found, *(one.grad for one in net.parameters() if one.grad is not None)]

    plain, net = layers_of(Layer), layers_of(Layer)
    offload = settled(client, net, x)
    before = len(cuts)
    for _ in range(2):
        assert_identical(train(net, lambda: offload), train(plain, nullcontext))
    assert len(cuts) >= before + 3


def test_experts_whose_weights_are_used_elsewhere_raise(client: storm.Client, x: Tensor) -> None:
    """If they are used more often than before: the order of their sum is not known then."""
    net = layers_of(Mixture)
    one, four = x.clone(), x.clone()
    one[0, 0, 0], four[0, 0, 0] = 0.5, 3.5
    offload = settled(client, net, one, with_weights)
    with pytest.raises(ActivationLost, match=r"used a tensor .* more often, .* elsewhere too"):
        step(net, four, with_weights, lambda: offload)
    plain = layers_of(Mixture)
    expected = step(plain, four, last, nullcontext)
    for _ in range(2):
        assert_identical(step(net, four, last, lambda: offload), expected)
    assert not any(parameter._backward_hooks for parameter in net.parameters())


def test_hooks_of_parts_and_passes_that_add_to_gradients(
    client: storm.Client, x: Tensor, cuts: list[str]
) -> None:
    def train(net: Any, context: Context) -> list[Tensor]:
        seen: list[Tensor] = []

        def note(_: nn.Module, grads: Any, outputs: Any = ()) -> None:
            seen.extend(one.clone() for one in (*grads, *outputs))

        handles = [one.register_full_backward_hook(note) for one in (net[1], net[1].up)]
        handles += [net[2].norm.register_full_backward_pre_hook(note)]
        torch.manual_seed(1)
        net.zero_grad()
        for scale in (1, 2):
            with context():
                loss = with_weights(net, x * scale)
            loss.backward()
        for handle in handles:
            handle.remove()
        return [*seen, *(one.grad for one in net.parameters() if one.grad is not None)]

    plain, net = layers_of(Twice), layers_of(Twice)
    offload = settled(client, net, x)
    before = len(cuts)
    for _ in range(2):
        expected = train(plain, nullcontext)
        assert_identical(train(net, lambda: offload), expected)
    assert len(cuts) > before


def penalized(net: Any, x: Tensor) -> Tensor:
    """Have the loss depend on a gradient."""
    loss = last(net, x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def test_gradients_of_gradients_have_graphs_where_the_trial_has_them(
    client: storm.Client, x: Tensor, cuts: list[str]
) -> None:
    plain, net = layers_of(Layer), layers_of(Layer)
    offload = client.offload(net, min_bytes=1)

    def train() -> None:
        expected = step(plain, x, penalized, nullcontext)
        assert_identical(step(net, x, penalized, lambda: offload), expected)

    train_until_on(offload, train)
    assert not cuts


def test_gradients_of_gradients_that_come_later_raise_once(client: storm.Client, x: Tensor) -> None:
    plain, net = layers_of(Layer), layers_of(Layer)
    offload = settled(client, net, x)
    expected = step(plain, x, penalized, nullcontext)
    with pytest.raises(ActivationLost, match=r"gradients of its gradients.*do this step again"):
        step(net, x, penalized, lambda: offload)
    assert_identical(step(net, x, penalized, lambda: offload), expected)


def test_two_calls_before_a_backward_pass_under_autocast(
    client: storm.Client, x: Tensor, cuts: list[str]
) -> None:
    """They share a cast of each weight, whose gradients are added in half precision."""

    def views(context: Context) -> Callable[..., Tensor]:
        def loss(net: Any, x: Tensor) -> Tensor:
            found = torch.zeros(())
            for scale in (1, 2):
                with context():
                    found = found + last(net, x * scale)
            return found

        return loss

    plain, net = layers_of(Layer), layers_of(Layer)
    offload = client.offload(net, min_bytes=1)

    def train() -> None:
        expected = step(plain, x, views(nullcontext), nullcontext, torch.bfloat16)
        found = step(net, x, views(lambda: offload), nullcontext, torch.bfloat16)
        assert_identical(found, expected)

    train_until_on(offload, train)
    assert not cuts


def test_one_call_and_then_two_under_autocast_raise_once(client: storm.Client, x: Tensor) -> None:
    plain, net = layers_of(Layer), layers_of(Layer)
    offload = client.offload(net, min_bytes=1)
    train_until_on(offload, lambda: step(net, x, last, lambda: offload, torch.bfloat16))

    def loss(net: Any, x: Tensor) -> Tensor:
        return last(net, x) + last(net, x * 2)

    expected = step(plain, x, loss, nullcontext, torch.bfloat16)
    with pytest.raises(ActivationLost, match="called once more under autocast"):
        step(net, x, loss, lambda: offload, torch.bfloat16)
    assert_identical(step(net, x, loss, lambda: offload, torch.bfloat16), expected)


class Handing(Layer):
    """Hands something on besides what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        HANDED[id(self)] = h.square().mean()
        return h


HANDED: dict[int, Tensor] = {}


@pytest.fixture
def nothing_handed() -> Iterator[None]:
    yield
    HANDED.clear()


def test_what_is_handed_on_besides_has_a_graph(
    client: storm.Client, x: Tensor, cuts: list[str], nothing_handed: None
) -> None:
    plain, net = layers_of(Handing), layers_of(Handing)
    offload = settled(client, net, x)

    def loss(net: Any, x: Tensor) -> Tensor:
        return last(net, x) + sum((HANDED[id(one)] for one in net), torch.zeros(()))

    expected = step(plain, x, loss, nullcontext)
    assert_identical(step(net, x, loss, lambda: offload), expected)
    assert not cuts


def test_a_tensor_that_nobody_knew_of_raises(client: storm.Client, x: Tensor) -> None:
    """Else it would get no gradient."""
    scale: list[Any] = [1.5]

    class Scaled(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale[0]

    net = layers_of(Scaled)
    offload = settled(client, net, x)
    scale[0] = torch.tensor(1.5, requires_grad=True)
    with pytest.raises(ActivationLost, match=r"used a tensor that it did not use before.*layers="):
        step(net, x, last, lambda: offload)
    scale[0] = scale[0] * 1
    with pytest.raises(ActivationLost, match="used a tensor that it did not use before"):
        step(net, x, last, lambda: offload)
    scale[0] = 1.5
    step(net, x, last, lambda: offload)


class Both(Layer):
    """Two results that need gradients."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = super().forward(x)
        return h, h.mean(-1)


class Viewed(Layer):
    """A view, which who is given it writes to."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mT


class Keeping(Layer):
    """Needs that its results need gradients."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        h.register_hook(lambda gradient: gradient * 2)
        return h


def both(net: Any, x: Tensor) -> Tensor:
    means = []
    for layer in net:
        x, mean = layer(x)
        means.append(mean.square().mean())
    return x.square().mean() + torch.stack(means).sum()


def written(net: Any, x: Tensor) -> Tensor:
    for layer in net:
        x = layer(x).add_(1.0).mT
    return x.square().mean()


@pytest.mark.parametrize(("kind", "loss"), [(Both, both), (Viewed, written), (Keeping, last)])
def test_what_one_node_cannot_stand_for_has_a_graph(
    client: storm.Client,
    x: Tensor,
    cuts: list[str],
    kind: type[nn.Module],
    loss: Callable[..., Tensor],
) -> None:
    plain, net = layers_of(kind), layers_of(kind)
    offload = settled(client, net, x, loss)
    expected = step(plain, x, loss, nullcontext)
    assert_identical(step(net, x, loss, lambda: offload), expected)
    assert not cuts
