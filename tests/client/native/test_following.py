"""What a save is, in Python and in compiled code: one table of cases for both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from typing import Any

import pytest
import storm_client as storm
import torch
from support.following import PATHS, Followed, follow_by
from support.planning import replay_all
from support.training import assert_identical, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Block = Callable[[], AbstractContextManager[object]]
Case = Callable[[Block, str], list[Tensor]]
"""Returns what a backward pass has made, of a forward pass in a block."""

CASES: dict[str, Case] = {}

ROWS, WIDTH = 16, 64
STEPS = 8

SETTLED_STEPS = 12
"""Whatever is planned anew once the turn of two steps has been timed."""


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def forward(function: Callable[[Tensor, Tensor], Iterator[Tensor]]) -> Case:
    """Add a forward pass in a block, of what is held until the backward pass has ended."""

    @wraps(function)
    def run(block: Block, device: str) -> list[Tensor]:
        x, w = inputs(device)
        holder = function(x, w)
        with block():
            loss = next(holder)
        loss.backward()
        return [loss.detach(), w.grad]

    return case(run)


def inputs(device: str) -> tuple[Tensor, Tensor]:
    """Return what a step computes with: a batch, and something to train."""
    return seeded(device, ROWS, WIDTH, seed=1), seeded(device, WIDTH, WIDTH, seed=2, grad=True)


@pytest.fixture(params=PATHS)
def followed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return follow_by(request.param, monkeypatch)


@forward
def a_chain(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    yield (x @ w).tanh().exp().sin().square().mean()


@forward
def views(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).exp()
    left, right = y.chunk(2, dim=1)
    loss = (left * right.flip(0)).sum() + (y.t()[3:9] * y.t()[9:15]).tanh().sum()
    loss = loss + (y[:, ::2].expand(2, ROWS, WIDTH // 2).exp()).mean()
    yield loss


@forward
def duplicates(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh()
    yield (y * y * y * x * x).sum() + (y @ y.t()).square().sum()


@forward
def conjugated_and_negated(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = torch.complex(x @ w, (x @ w).sin()).exp()
    yield (y.conj() * y.imag * torch._neg_view(y.real)).abs().square().sum()


@forward
def nothing_in_it(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    empty = (x[:0] @ w).tanh()
    yield (x @ w).tanh().sum() + empty.exp().sum()


@forward
def small_ones(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).exp()
    scale = y[0, :3].sum().sigmoid().tanh()
    yield (y * scale).tanh().sum()


@case
def leaves_and_buffers(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    table, more = seeded(device, ROWS, WIDTH, seed=3), seeded(device, ROWS, WIDTH, grad=True)
    with block():
        loss = ((x @ w) * table * more).tanh().mul(table).sum()
    loss.backward()
    return [loss.detach(), w.grad, more.grad]


@forward
def tables(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    """As rotary embeddings, masks and indices: no operation has made them, and many read them."""
    device = x.device.type
    table, mask = seeded(device, ROWS, WIDTH, seed=3), seeded(device, ROWS, WIDTH, seed=4) > 0
    rows = torch.arange(ROWS, device=device).flip(0).repeat(4)
    y = x @ w
    for _ in range(3):
        y = (y * table).tanh() + (y * table.t().reshape(ROWS, WIDTH)).masked_fill(mask, 0.5)
        y = y[rows].exp().tanh()[:ROWS] + y.index_select(0, rows[::4]).sin().tanh()
    yield (y * y).sum()


@case
def a_table_that_is_changed_uncounted(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    table = seeded(device, ROWS, WIDTH, seed=3)
    with block():
        y = ((x @ w) * table).exp().tanh()
        loss = (y * y).sum()
    table.data.mul_(2)
    loss.backward()
    return [loss.detach(), w.grad]


@case
def a_table_that_is_changed_between(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    table, other = seeded(device, ROWS, WIDTH, seed=3), seeded(device, ROWS, WIDTH, grad=True)
    with block():
        y = (other * 2 + table).exp().tanh()
        table.add_(1)
        z = ((x @ w).detach() * other + table).exp().tanh()
        loss = (y * z).sum()
    table.zero_()
    loss.backward()
    return [loss.detach(), other.grad]


@forward
def an_input_that_is_changed_before_anything_is_saved(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).cumsum(0)  # which no operation recomputes
    made = [y.exp(), y.tanh(), y.sigmoid()]
    with torch.no_grad():
        y.add_(1)
    yield torch.stack(made).tanh().sum()


@forward
def a_changed_result(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).exp()
    z = y * 2
    y.add_(1)
    yield (y.tanh() + z).sum()


@forward
def a_changed_view(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = x @ w
    loss = y.tanh().sum() + y.exp().t().sin().sum()
    y.t()[1:3].mul_(2)
    yield loss


@case
def a_changed_leaf(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with block():
        loss = (x @ w).tanh().sum()
    x.add_(1)
    loss.backward()
    return [loss.detach(), w.grad]


@forward
def writes_that_nothing_saved_sees(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = x @ w
    y.add_(1).mul_(2)
    y[:, 2:5] = 0
    yield y.exp().tanh().sum()


@case
def other_data_for_a_leaf(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with block():
        loss = (x @ w).tanh().sum()
    x.data = seeded(device, ROWS, WIDTH, seed=4)
    loss.backward()
    return [loss.detach(), w.grad]


@case
def other_data_for_a_result(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with block():
        y = (x @ w).tanh()
        loss = (y * y).sin().sum()
    y.data = seeded(device, ROWS, WIDTH, seed=4)
    loss.backward()
    return [loss.detach(), w.grad]


@case
def other_data_for_a_parameter(block: Block, device: str) -> list[Tensor]:
    x, _ = inputs(device)
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH).to(device)
    x.requires_grad_()
    with block():
        loss = net(x).tanh().sum()
    net.weight.data = seeded(device, WIDTH, WIDTH, seed=4)
    loss.backward()
    return [loss.detach(), x.grad, net.weight.grad]


@case
def inference(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with torch.inference_mode():
        constant = x.clone()
    with block():
        y = (x @ w).tanh()
        loss = (y * y + x).exp().sum()
    with torch.inference_mode():
        assert constant.is_inference()
    loss.backward()
    return [loss.detach(), w.grad]


class Marked(Tensor):
    """A subclass."""


@case
def a_subclass(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with block():
        y = (x.as_subclass(Marked) @ w).tanh()
        loss = (y * y).exp().sum()
    loss.backward()
    return [loss.detach().as_subclass(Tensor), w.grad.as_subclass(Tensor)]


@case
def twice_backward(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with block():
        loss = (x @ w).tanh().exp().sum()
    loss.backward(retain_graph=True)
    once = w.grad.clone()
    loss.backward()
    return [loss.detach(), once, w.grad]


@case
def a_second_derivative(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with block():
        loss = (x @ w).tanh().exp().sum()
        (first,) = torch.autograd.grad(loss, w, create_graph=True)
        total = loss + first.square().sum()
    total.backward()
    return [total.detach(), w.grad]


@case
def a_backward_pass_inside(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with block():
        y = (x @ w).tanh()
        y.exp().sum().backward(retain_graph=True)
        loss = (y * y).sin().sum()
        loss.backward()
    return [loss.detach(), w.grad]


@forward
def checkpointed(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = checkpoint(lambda y: y.tanh().exp().sin(), x @ w, use_reentrant=False)
    yield (y * y).sum()


class Product(torch.autograd.Function):
    """Saves its inputs, its output and what is neither."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        made, besides = a * b, a.tanh()
        ctx.save_for_backward(a, b, made, besides)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b, made, besides = ctx.saved_tensors
        return grad * b + made * 0, grad * a + besides * 0


@forward
def a_function_of_ones_own(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh()
    yield Product.apply(y, y.exp()).sum()


class OfAlias(torch.autograd.Function):
    """Saves an alias of its input, which is part of no graph, as losses in tiles do."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, alias: Tensor) -> Tensor:
        ctx.save_for_backward(alias)
        return a.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (alias,) = ctx.saved_tensors
        return 2 * grad * alias, None


@forward
def an_alias_of_a_result(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh().exp()
    yield (OfAlias.apply(y, y.detach()) * y).tanh().sum()


@forward
def a_changed_alias_of_a_result(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh().exp()
    loss = OfAlias.apply(y, y.detach()).tanh().sum()
    with torch.no_grad():
        y.mul_(2)
    yield loss


@case
def a_loss_in_tiles(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    head = nn.Parameter(seeded(device, 1 << 17, WIDTH, seed=4))
    with block():
        logits = ((x @ w).tanh() @ head.t()).bfloat16()
        loss = cross_entropy(logits.float(), torch.arange(ROWS, device=device))
    del logits
    loss.backward()
    return [loss.detach(), w.grad, head.grad]


class Rows(torch.autograd.Function):
    """Saves views of its inputs, and returns one of memory that it has filled itself."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        rows, others = a.view(-1), b.view(-1)
        made = torch.empty_like(rows)
        made.copy_(rows * others)
        ctx.save_for_backward(rows, others)
        return made.view(a.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, others = ctx.saved_tensors
        return grad * others.view(grad.shape), grad * rows.view(grad.shape)


@forward
def views_in_a_function_of_ones_own(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh()
    z = Rows.apply(y, y.exp()).sigmoid()
    yield Rows.apply(z, z.exp()).sin().exp().sum()


@forward
def a_changed_view_of_ones_own(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh()
    made = Rows.apply(y, y.exp())
    loss = made.sin().sum()
    made.mul_(2)
    yield loss


@forward
def a_changed_output_of_ones_own(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh()
    made = Product.apply(y, y.exp())
    loss = made.sum()
    made.mul_(2)
    yield loss


@case
def casts(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    net = nn.Linear(WIDTH, WIDTH).to(device)
    with torch.no_grad():
        net.weight.copy_(w)
        net.bias.zero_()
    with block(), torch.autocast(device, torch.bfloat16):
        y = net(net(x).float().exp()).tanh()
        loss = (net(y) * y).float().square().mean()
    loss.backward()
    return [loss.detach(), net.weight.grad, net.bias.grad]


@case
def a_layer(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    norm = nn.LayerNorm(WIDTH).to(device)
    with block():
        y = norm(x @ w)
        gate, up = y @ w, y @ w.t()
        z = nn.functional.silu(gate) * up
        q = z.view(2, 2, ROWS // 2, WIDTH // 2)
        a = nn.functional.scaled_dot_product_attention(q, q, q * 2, is_causal=True)
        a = torch.cat([a.flatten(0, 2), a.flatten(0, 2) + 1]).softmax(-1)
        loss = (a.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().mul(a).sum()
    loss.backward()
    return [loss.detach(), w.grad, norm.weight.grad]


@case
def recomputed_after_a_change(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    with block():
        y = (x @ w).tanh()
        z = (y * 2).exp()
        loss = z.sin().sum()
    with torch.no_grad():
        w.mul_(2)
    loss.backward()
    return [loss.detach(), w.grad]


@forward
def an_operator_that_fails(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh()
    with suppress(RuntimeError):
        y @ y
    yield (y * (y * 2)).exp().sum()


class Doubling(TorchDispatchMode):
    """Returns twice what a product is."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return made * 2 if function is torch.ops.aten.mul.Tensor else made


@forward
def a_mode_that_alters(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    y = (x @ w).tanh()
    with Doubling():
        z = y * y.sin()
    yield (z * y).exp().sum()


@case
def dropouts(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    torch.manual_seed(3)
    with block():
        y = functional.dropout((x @ w).tanh(), 0.3)
        z = torch.dropout(y.exp(), 0.5, train=True) * y
        a = functional.alpha_dropout(z.sin(), 0.2, training=True).exp()
        b = functional.dropout2d(z.view(2, 8, 8, 8), 0.4).sin().exp()
        loss = a.square().sum() + b.square().sum() + functional.dropout(y, training=False).sum()
    loss.backward()
    return [loss.detach(), w.grad, torch.rand(4, device=device)]


@case
def attention_with_dropout(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    torch.manual_seed(3)
    with block():
        q = (x @ w).view(2, 2, ROWS // 2, WIDTH // 2)
        a = functional.scaled_dot_product_attention(q, q.sin(), q * 2, dropout_p=0.25)
        loss = functional.dropout(a.exp().sin(), 0.1).square().sum()
    loss.backward()
    return [loss.detach(), w.grad, torch.rand(4, device=device)]


@case
def seeded_between_the_passes(block: Block, device: str) -> list[Tensor]:
    x, w = inputs(device)
    torch.manual_seed(3)
    with block():
        loss = functional.dropout((x @ w).tanh(), 0.3).exp().sin().square().sum()
    torch.manual_seed(4)
    drawn = torch.rand(4, device=device)
    loss.backward(retain_graph=True)
    drawn = torch.cat([drawn, torch.rand(4, device=device)])
    loss.backward()
    return [loss.detach(), w.grad, drawn, torch.rand(4, device=device)]


@case
def in_two_threads(block: Block, device: str) -> list[Tensor]:
    found: dict[int, list[Tensor]] = {}

    def run(number: int) -> None:
        found[number] = a_chain(block, device) + views(block, device)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found[0] + found[1]


def outcome(run: Callable[[], list[Tensor]]) -> list[Tensor] | str:
    """Return what it returns, or what it says if PyTorch refuses."""
    try:
        return run()
    except RuntimeError as error:
        return str(error).partition("Hint")[0]


@pytest.mark.parametrize("fate", ["kept", "recomputed", "offloaded"])
@pytest.mark.parametrize("name", CASES)
def test_a_save_is_the_same_to_both(
    name: str,
    fate: str,
    device: str,
    client: storm.Client,
    followed: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fate == "recomputed":
        replay_all(monkeypatch)

    def run(block: Block) -> list[Tensor]:
        return CASES[name](block, device)

    expected = outcome(lambda: run(nullcontext))
    offload = client.offload(
        min_bytes=256,
        budget={"kept": 1.0, "recomputed": "least", "offloaded": 0.0}[fate],
        replay=fate != "offloaded",
    )
    for _ in range(STEPS):
        found = outcome(lambda: run(lambda: offload))
        assert isinstance(found, str) == isinstance(expected, str), found
        if isinstance(found, list) and isinstance(expected, list):
            assert_identical(found, expected)
        else:
            assert found == expected


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    return follow_by("compiled", monkeypatch)


def test_steps_whose_saves_stay_are_followed_by_compiled_code(
    device: str, client: storm.Client, compiled: Followed
) -> None:
    offload = client.offload(min_bytes=256, budget=1.0)
    for _ in range(STEPS):
        a_chain(lambda: offload, device)
    assert compiled[-1]
    assert not compiled[0]


def test_both_count_the_same(
    device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(path: str) -> tuple[dict[str, int], int, dict[str, dict[str, int]]]:
        with monkeypatch.context() as patched:
            followed = follow_by(path, patched)
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).to(device)
            offload = client.offload(net, min_bytes=512, budget=1.0)
            for _ in range(STEPS):
                with offload:
                    loss = net(seeded(device, ROWS, WIDTH)).square().mean()
                loss.backward()
            stats = offload.stats()
            layers = {name: dict(one.skipped) for name, one in offload.report().layers.items()}
            assert followed[-1] == (path == "compiled")
            return dict(stats.skipped), stats.saved_bytes, layers

    assert counted("compiled") == counted("python")
    assert counted("python")[0]["budget"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "a_chain",
        "a_layer",
        "views",
        "duplicates",
        "casts",
        "an_alias_of_a_result",
        "a_loss_in_tiles",
        "dropouts",
        "attention_with_dropout",
        "seeded_between_the_passes",
    ],
)
def test_steps_with_recomputation_are_followed_by_compiled_code(
    name: str,
    device: str,
    client: storm.Client,
    compiled: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_all(monkeypatch)
    offload = client.offload(min_bytes=256)
    for _ in range(SETTLED_STEPS):
        CASES[name](lambda: offload, device)
    assert compiled[-1]
    assert not compiled.left, offload.plan
    assert offload.stats().replayed_bytes > 0, str(offload.plan)


@pytest.mark.parametrize("budget", [1.0, "least"])
def test_a_step_that_leaves_its_script_goes_on_in_python(
    budget: float | str,
    device: str,
    client: storm.Client,
    compiled: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_all(monkeypatch)
    offload = client.offload(min_bytes=256, budget=budget)

    def step(block: Block, rows: int) -> list[Tensor]:
        x, w = seeded(device, rows, WIDTH), seeded(device, WIDTH, WIDTH, seed=2, grad=True)
        with block():
            y = (x @ w).tanh()
            y = y[:8].exp() if rows > 8 else y.exp()
            loss = y.square().sum() + (x @ w).tanh().sum()
        loss.backward()
        return [loss.detach(), w.grad]

    for rows in [16] * STEPS + [24, 16, 8, 16, 16, 24, 24, 24, 8, 16]:
        assert_identical(step(lambda: offload, rows), step(nullcontext, rows))
    assert any(compiled)


def test_autocast_casts_no_argument_again_whose_cast_is_recomputed(
    client: storm.Client, compiled: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_all(monkeypatch)
    torch.manual_seed(0)
    layers = 4
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
    x = seeded("cpu", ROWS, WIDTH, seed=1)

    def casts(block: AbstractContextManager[object]) -> int:
        with block, torch.autocast("cpu", torch.bfloat16):
            loss = net(x.exp()).float().square().mean()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
        return sum(one.name == "aten::_to_copy" for one in profile.events())

    offload = client.offload(net, min_bytes=256)
    found = [casts(offload) for _ in range(SETTLED_STEPS)]
    assert compiled[-1]
    assert not compiled.left
    of_backward = casts(nullcontext())
    assert found[-1] <= of_backward + 2 * layers  # of a weight and of what is given to it
    assert found[-1] > of_backward


def test_a_view_of_a_leaf_as_large_as_what_is_expected_is_no_alias_of_it(
    client: storm.Client, compiled: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_all(monkeypatch)
    weight = nn.Parameter(seeded("cpu", WIDTH, WIDTH, seed=1))
    x = seeded("cpu", WIDTH, WIDTH, seed=2, grad=True)
    offload = client.offload(min_bytes=1)  # which knows no parameter
    for _ in range(SETTLED_STEPS):
        with offload:
            loss = (silu(silu(x @ weight.t()) @ weight.t()) @ weight.t()).square().mean()
        loss.backward()
    assert compiled[-1]
    assert not compiled.left
    assert offload.stats().replayed_bytes > 0
