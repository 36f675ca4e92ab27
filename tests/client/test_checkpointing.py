"""Layers that a user names are checkpointed in the blocks of that Offload, and nowhere else."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client import checkpointing, offloading
from storm_client.checkpointing import CheckpointedLayers
from storm_client.errors import UsageError
from support.training import Context, assert_identical, gradients
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS, LAYERS = 32, 64, 3
STEPS = 4


class Layer(nn.Module):
    """Counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        made = self.drop(self.down(torch.tanh(self.up(x))))
        return x + (made if scale is None else made * scale)


class Model(nn.Module):
    """Layers in a row; another one around each two for those that are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **options)
        return self.head(x)


def made(kind: type[nn.Module] = Model) -> Any:
    torch.manual_seed(0)
    return kind()


def step(net: nn.Module, context: Context, x: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Do a step; return the loss, all gradients and the next random number."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH) if x is None else x
    net.zero_grad()
    with context():
        loss = net(x, **options).square().mean()
    loss.backward()
    return [loss.detach().clone(), *(one.clone() for one in gradients(net)), torch.rand(1)]


def calls(net: Model) -> list[int]:
    """Return how often each layer was called since the last time."""
    found = [block.calls for block in net.blocks]
    for block in net.blocks:
        block.calls = 0
    return found


@pytest.fixture
def net() -> Model:
    return made()


def is_untouched(net: nn.Module) -> bool:
    return not any("forward" in vars(module) for module in net.modules())


# --- what is named --------------------------------------------------------------------------------
NAMED: dict[str, tuple[Callable[[Model], Any], list[int]]] = {
    "nothing": (lambda _: (), [1, 1, 1]),
    "a list of modules": (lambda net: net.blocks, [2, 2, 2]),
    "in a list": (lambda net: [net.blocks], [2, 2, 2]),
    "some": (lambda net: net.blocks[1:], [1, 2, 2]),
    "one": (lambda net: net.blocks[0], [2, 1, 1]),
    "a class": (lambda _: Layer, [2, 2, 2]),
    "a name": (lambda _: "blocks.2", [1, 1, 2]),
    "a list's name": (lambda _: ["blocks"], [2, 2, 2]),
    "twice": (lambda net: ["blocks.1", net.blocks[1]], [1, 2, 1]),
}


@pytest.mark.parametrize(
    ("named", "budget"), [*((named, "least") for named in NAMED), ("some", 0.5), ("some", 1 << 16)]
)
def test_bits_are_the_same_and_what_is_named_is_called_again(
    client: storm.Client, net: Model, named: str, budget: Any
) -> None:
    layers, expected = NAMED[named]
    offload = client.offload(net, min_bytes=1, budget=budget, layers=layers(net))
    plain = step(net, nullcontext)
    assert calls(net) == [1] * LAYERS
    for _ in range(STEPS):
        assert_identical(step(net, lambda: offload), plain)
        assert calls(net) == expected
        assert is_untouched(net)


def test_what_needs_no_gradient_is_called_once(client: storm.Client, net: Model) -> None:
    offload = client.offload(net, layers=net.blocks)
    for context in (torch.no_grad, torch.inference_mode):
        with offload, context():
            net(torch.ones(2, WIDTH))
        assert calls(net) == [1] * LAYERS


def test_what_is_saved_inside_takes_no_memory(client: storm.Client, net: Model) -> None:
    saved = []
    for layers in ((), net.blocks):
        offload = client.offload(net, min_bytes=1, layers=layers)
        step(net, lambda offload=offload: offload)
        saved.append(offload.stats())
    inputs = (LAYERS + 1) * ROWS * WIDTH * 4
    assert saved[0].saved_bytes > 3 * inputs
    # The inputs of layers and of the head are handed over, and what the head and the loss save.
    assert inputs <= saved[1].saved_bytes <= inputs + (WIDTH + ROWS) * 8 * 4


# --- wrong names ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda _: [3], "layers has int 3; pass modules of the model, as in layers=model.blocks"),
        (lambda _: None, "layers has NoneType; pass modules"),
        (
            lambda _: "block.1",
            r"layers has str 'block.1', .* does not have: did you mean 'blocks.1'",
        ),
        (lambda _: nn.LSTM, "layers has class LSTM, which the model does not have; pass"),
        (lambda _: int, "layers has class int; pass modules"),
        (lambda _: [Layer()], "layers has Layer, which the model does not have; pass modules"),
        (lambda net: [net.head.weight], "layers has Parameter; pass modules"),
    ],
)
def test_what_names_no_module_is_refused(
    client: storm.Client, net: Model, layers: Callable[[Model], Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        client.offload(net, layers=layers(net))


def test_without_a_model_modules_are_taken_and_names_refused(
    client: storm.Client, net: Model
) -> None:
    offload = client.offload(layers=net.blocks)
    plain = step(net, nullcontext)
    calls(net)
    assert_identical(step(net, lambda: offload), plain)
    assert calls(net) == [2] * LAYERS
    for named in ("blocks.1", Layer):
        with pytest.raises(UsageError, match="which the model does not have"):
            client.offload(layers=named)


# --- arguments ------------------------------------------------------------------------------------
def test_what_is_given_by_name_leaves_too_and_is_looked_at(
    client: storm.Client, net: Model
) -> None:
    offload = client.offload(net, min_bytes=1, layers=net.blocks[0])
    scale = torch.full((WIDTH,), 0.5, requires_grad=True)
    plain = step(net, nullcontext, scale=scale)
    for _ in range(STEPS):
        assert_identical(step(net, lambda: offload, scale=scale), plain)
    with offload:
        factor = scale * 2
        loss = net.blocks[0](torch.ones(ROWS, WIDTH), scale=factor).sum()
    with torch.no_grad():
        factor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_saved_is_held(client: storm.Client) -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor, shift: Tensor, more: Tensor) -> Tensor:
            return torch.tanh(super().forward(x) + shift - more)

    net = nn.Sequential(Shifted(WIDTH, WIDTH))
    with torch.inference_mode():
        shift = torch.full((WIDTH,), 0.5)

    def train(context: Context) -> list[Tensor]:
        net.zero_grad()
        with context():
            loss = net[0](torch.ones(ROWS, WIDTH), shift, more=shift).sum()
        loss.backward()
        return [gradient.clone() for gradient in gradients(net)]

    offload = client.offload(net, min_bytes=1, layers=Shifted)
    assert_identical(train(lambda: offload), train(nullcontext))


def test_arguments_may_have_the_names_of_checkpoints_own(client: storm.Client) -> None:
    class Naming(nn.Linear):
        def forward(self, x: Tensor, *, use_reentrant: int, function: Tensor) -> Tensor:
            return super().forward(x) * use_reentrant * function

    net = nn.Sequential(Naming(WIDTH, WIDTH))
    with client.offload(net, layers=Naming):
        loss = net[0](torch.ones(1, WIDTH), use_reentrant=2, function=torch.ones(1)).sum()
    loss.backward()
    assert net[0].weight.grad.eq(2).all()


# --- nesting --------------------------------------------------------------------------------------
class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x


def test_a_layer_in_a_layer_is_part_of_that_one(client: storm.Client) -> None:
    net = nn.Sequential(Outer(), nn.Linear(WIDTH, 4))
    plain = step(net, nullcontext)
    calls(net[0])
    offload = client.offload(net, min_bytes=1, layers=[Layer, Outer])
    assert_identical(step(net, lambda: offload), plain)
    assert calls(net[0]) == [2, 2]
    assert net[0].calls == 3


def test_a_users_own_checkpoint_goes_on_inside_and_outside(
    client: storm.Client, net: Model
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            return checkpoint(self.module, x, use_reentrant=False, **options)

    plain = step(net, nullcontext)
    blocks = list(net.blocks)
    for layers in (Layer, Checkpointed):
        net.blocks = nn.ModuleList(map(Checkpointed, blocks))
        offload = client.offload(net, min_bytes=1, layers=layers)
        for block in blocks:
            block.calls = 0
        assert_identical(step(net, lambda offload=offload: offload), plain)
        assert {block.calls for block in blocks} <= {2, 3}
        assert is_untouched(net)


def test_the_innermost_block_decides(client: storm.Client, net: Model) -> None:
    named = client.offload(net, min_bytes=1, layers=net.blocks)
    other = client.offload(net, min_bytes=1)
    plain = step(net, nullcontext)
    for outer, inner, expected in ((named, other, 1), (other, named, 2), (named, named, 2)):
        calls(net)
        with outer:
            assert_identical(step(net, lambda inner=inner: inner), plain)
            assert calls(net) == [expected] * LAYERS
            assert is_untouched(net) is (outer is other)
        assert is_untouched(net)


def test_within_other_hooks_a_layer_is_called_once(client: storm.Client, net: Model) -> None:
    plain = step(net, nullcontext)
    calls(net)
    with client.offload(net, layers=net.blocks):
        found = step(net, lambda: saved_tensors_hooks(lambda x: x, lambda x: x))
    assert_identical(found, plain)
    assert calls(net) == [1] * LAYERS


def test_gradients_of_gradients_and_graphs_that_are_used_twice(
    client: storm.Client, net: Model
) -> None:
    def penalty(context: Context) -> list[Tensor]:
        torch.manual_seed(2)
        net.zero_grad()
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with context():
            loss = net(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward(retain_graph=True)
        loss.backward()
        return [gradient.clone() for gradient in gradients(net)]

    offload = client.offload(net, min_bytes=1, layers=net.blocks)
    expected = penalty(nullcontext)
    for _ in range(2):
        assert_identical(penalty(lambda: offload), expected)


# --- the module is as it ever was -----------------------------------------------------------------
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_forward_leaves_everything_as_it_was(
    client: storm.Client, net: Model, error: type[BaseException]
) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise error("mine")
            return torch.tanh(x)

        fails = True

    net.blocks.append(Failing())
    offload = client.offload(net, min_bytes=1, layers=[*net.blocks])
    top = torch._C._autograd._top_saved_tensors_default_hooks
    kept: BaseException | None = None
    try:
        with offload:
            pack = top(True)[0]
            try:
                net(torch.ones(ROWS, WIDTH))
            finally:
                assert top(True)[0] == pack  # while the exception lives
    except error as raised:
        kept = raised
    assert kept is not None
    assert top(True) is None
    assert is_untouched(net)
    net.blocks[-1].fails = False
    plain = step(net, nullcontext)
    with offload:
        assert top(True)[0] != pack
        del kept  # what its traceback holds takes no hooks of others off
        gc.collect()
        assert top(True) is not None
    assert_identical(step(net, lambda: offload), plain)


def test_an_exception_in_the_recomputation_is_the_users(client: storm.Client) -> None:
    class Second(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("mine")
            return torch.tanh(super().forward(x))

    net = nn.Sequential(Second(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    offload = client.offload(net, min_bytes=1, layers=Second)
    with offload:
        loss = net(torch.ones(4, WIDTH)).sum()
    with pytest.raises(ValueError, match="mine"):
        loss.backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


OLDER = """
def checkpoint(function, *args, use_reentrant):
    import torch.autograd.graph as graph
    def hooked():
        with graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            yield
    generator = hooked()
    next(generator)
    return function(*args)
"""


def test_hooks_that_a_version_of_pytorch_leaves_on_are_taken_off(
    client: storm.Client, net: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.13 an exception left them to the death of its traceback."""
    found: dict[str, Any] = {}
    exec(compile(OLDER, checkpointing.pytorch.__file__, "exec"), found)
    monkeypatch.setattr(checkpointing.pytorch, "checkpoint", found["checkpoint"])
    test_an_exception_in_a_forward_leaves_everything_as_it_was(client, net, ValueError)


def test_layers_that_change_what_they_save_raise(client: storm.Client) -> None:
    class Other(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(super().forward(x[: len(x) // self.calls])).sum()

    net = nn.Sequential(Other(WIDTH, WIDTH))
    with client.offload(net, min_bytes=1, layers=Other):
        loss = net(torch.ones(4, WIDTH)).sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        loss.backward()


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_that_are_made_in_a_block_have_their_own_forward(
    client: storm.Client, net: Model, way: str
) -> None:
    offload = client.offload(net, layers=net.blocks)
    state = list(net.state_dict())
    with offload:
        assert list(net.state_dict()) == state
        assert b"storm_client" not in pickle.dumps(net)
        copied = COPIES[way](net)
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert copied(torch.ones(1, WIDTH)).eq(0).all()
        assert not net(torch.ones(1, WIDTH)).eq(0).any()
        assert calls(copied) == [1] * LAYERS
        assert inspect.signature(net.blocks[0].forward) == inspect.signature(Layer().forward)
    assert list(net.state_dict()) == state


def test_a_copied_offload_has_the_layers_of_the_copied_model(
    client: storm.Client, net: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "shared_supply", lambda: client._supply)
    net.offload = client.offload(net, min_bytes=1, layers=net.blocks)
    copied = pickle.loads(pickle.dumps(net))
    plain = step(net, nullcontext)
    calls(net)
    assert_identical(step(copied, lambda: copied.offload), plain)
    assert calls(copied) == [2] * LAYERS
    assert calls(net) == [0] * LAYERS


def test_a_forward_that_is_wrapped_in_a_block_stays(client: storm.Client, net: Model) -> None:
    offload = client.offload(net, min_bytes=1, layers=net.blocks)
    first = net.blocks[0]
    with offload:
        inner = first.forward
        first.forward = lambda x: 2 * inner(x)
        wrapped = first.forward
    assert first.forward is wrapped
    plain = step(net, nullcontext)
    calls(net)
    for _ in range(2):
        assert_identical(step(net, lambda: offload), plain)
        assert first.forward is wrapped
    assert calls(net) == [4] * LAYERS


def test_nothing_is_kept_alive(client: storm.Client) -> None:
    net = made()
    offload = client.offload(net, min_bytes=1, layers=net.blocks)
    with offload:
        out = net(torch.ones(ROWS, WIDTH))
    alive = [weakref.ref(net), weakref.ref(offload)]
    del net, offload
    gc.collect()
    out.sum().backward()
    del out
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_layers_whose_step_an_interrupt_has_ended_do_not_stay_wrapped(net: Model) -> None:
    layers, steps = CheckpointedLayers(net.blocks), [nn.Identity(), nn.Identity()]
    layers.begin(steps.pop())  # which dies, and its end is not told
    layers.begin(steps[0])
    layers.end(steps[0])
    assert is_untouched(net)


# --- threads --------------------------------------------------------------------------------------


def test_blocks_of_two_threads_may_end_in_any_order(client: storm.Client, net: Model) -> None:
    first = client.offload(net, min_bytes=1, layers=net.blocks)
    second = client.offload(net, min_bytes=1, layers=net.blocks[:2])
    began, go_on = threading.Event(), threading.Event()
    losses: list[Tensor] = []

    def train() -> None:
        with second:
            began.set()
            assert go_on.wait(60)
            losses.append(net(torch.ones(ROWS, WIDTH)).sum())

    thread = threading.Thread(target=train)
    with first:
        thread.start()
        assert began.wait(60)
        net(torch.ones(ROWS, WIDTH)).sum().backward()
        assert calls(net) == [2] * LAYERS
    assert not is_untouched(net)
    go_on.set()
    thread.join(60)
    losses[0].backward()
    assert calls(net) == [2, 2, 1]
    assert is_untouched(net)


# --- compiled, wrapped ----------------------------------------------------------------------------
@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("way", ["model", "layers"])
def test_what_is_compiled(client: storm.Client, net: Model, way: str) -> None:
    """It is compiled once; a compiled forward is checkpointed, and what is inside of one is not."""
    net.blocks = nn.ModuleList(
        nn.Sequential(block.up, nn.Tanh(), block.down) for block in net.blocks
    )
    made_graphs: list[object] = []

    def backend(graph: Any, _: object) -> Any:
        made_graphs.append(graph)
        return graph.forward

    plain = step(net, nullcontext)
    run: Any = net
    if way == "model":
        run = torch.compile(net, backend=backend)
    else:
        net.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in net.blocks)
    offload = client.offload(net, min_bytes=1, layers=list(net.blocks))
    counts = []
    for _ in range(STEPS):
        assert_identical(step(run, lambda: offload), plain)
        counts.append(len(made_graphs))
    assert counts[1:] == [counts[1]] * (STEPS - 1)
    saved = [offload.stats().saved_bytes]
    other = client.offload(net, min_bytes=1)
    for _ in range(STEPS):
        step(run, lambda: other)
    saved.append(other.stats().saved_bytes)
    assert saved[0] == saved[1] if way == "model" else saved[0] < saved[1]


def test_single_operations_are_recomputed_beside_named_layers(client: storm.Client) -> None:
    net = nn.Sequential(Layer(), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 1))
    plain = step(net, nullcontext, torch.ones(32 * ROWS, WIDTH))
    offload = client.offload(net, min_bytes=1 << 10, layers=Layer)
    for _ in range(2 * STEPS):
        assert_identical(step(net, lambda: offload, torch.ones(32 * ROWS, WIDTH)), plain)
    assert "gelu" in {row.operation for row in offload.plan.rows if row.decision == "replay"}
    assert offload.stats().replayed_bytes > 0


def test_both_passes_in_a_block(client: storm.Client, net: Model) -> None:
    offload = client.offload(net, min_bytes=1, layers=net.blocks)

    def train(context: Context) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        with context():
            net(torch.randn(ROWS, WIDTH)).square().mean().backward()
        return [gradient.clone() for gradient in gradients(net)]

    plain = train(nullcontext)
    for _ in range(2 * STEPS):
        calls(net)
        assert_identical(train(lambda: offload), plain)
        assert calls(net) == [2] * LAYERS


def test_a_warning_of_little_saved_is_not_about_what_was_named(client: storm.Client) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = torch.tanh(part(x))
            return x

    net = nn.Sequential(Wide(), Wide())

    def train(offload: storm.Offload, run: Callable[[Tensor], Tensor]) -> None:
        for _ in range(4):
            with offload:
                loss = run(torch.ones(8, 256)).sum()
            loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(client.offload(net, min_bytes=1 << 10, layers=Wide), net)
    with pytest.warns(RuntimeWarning, match="little memory is"):
        train(client.offload(net, min_bytes=1 << 10), partial(checkpoint, net, use_reentrant=False))
