"""Saved tensors that are recomputed: bit for bit what they were, or an exception."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import storm_client as storm
import torch
from storm_client.eager import plan_maker
from storm_client.eager.recorder import Recorder
from storm_client.eager.signature import StepSignature
from storm_client.planner.machine import CPU
from support.altering_modes import ScaledBelow, SteeperSlopes
from support.following import PATHS, follow_by
from support.planning import replay_all
from support.random_programs import run
from support.thread_counts import omp_threads, one_thread, one_thread_more
from support.training import Context, assert_identical, gradients, seeded
from support.waiting import wait_until
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import (
    conv2d,
    layer_norm,
    leaky_relu,
    scaled_dot_product_attention,
    silu,
)
from torch.overrides import _get_current_function_mode

from tests.client.eager.test_settings import OTHERS

WIDTH = 64
NODES, EDGES = 32, 5
STEPS = 6


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_all(monkeypatch)


class Block(nn.Module):
    """A norm, a gated product and a residual sum: chains of five operations that all save."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(silu(self.gate(h)) * self.up(h).sigmoid())


def blocks(device: str, count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).to(device)


def step(net: nn.Module, x: Tensor, context: Context) -> list[Tensor]:
    net.zero_grad()
    with context():
        loss = net(x).square().mean()
    loss.backward()
    return [loss.detach().clone(), *(gradient.clone() for gradient in gradients(net))]


def assert_later_steps_are_identical(
    train: Callable[[Context, bool], list[Tensor]], offload: storm.Offload
) -> None:
    """Have a program be told when it has been learned, to do something else from then on."""
    for number in range(2 * STEPS):
        is_later = number >= STEPS
        expected = train(nullcontext, is_later)
        assert_identical(train(lambda: offload, is_later), expected)


def assert_steps_are_identical(
    train: Callable[[Context], list[Tensor]], offload: storm.Offload
) -> None:
    """Compare steps with offload to one without, while they are learned, tried and planned."""
    expected = train(nullcontext)
    for _ in range(STEPS):
        assert_identical(train(lambda: offload), expected)


def signatures(offload: storm.Offload) -> list[StepSignature]:
    return list(offload._planning._signatures._known.values())


def rejected(offload: storm.Offload) -> dict[int, str]:
    found = (signature.evidence.rejected.items() for signature in signatures(offload))
    return dict(chain.from_iterable(found))


def test_steps_are_identical_before_while_and_after_they_are_planned(
    device: str, client: storm.Client
) -> None:
    net, x = blocks(device), seeded(device, 32, WIDTH)
    expected = step(net, x, nullcontext)
    offload = client.offload(net, min_bytes=1)
    offloaded = []
    for _ in range(STEPS):
        assert_identical(step(net, x, lambda: offload), expected)
        offloaded.append(offload.stats().offloaded_bytes)
    stats = offload.stats()
    assert stats.replayed_bytes > 0
    assert stats.replay_seconds > 0
    assert offloaded[-1] - offloaded[-2] < (offloaded[1] - offloaded[0]) / 4
    assert not rejected(offload)
    wait_until(lambda: is_all_counted(offload.stats()), 30, offload.stats)


def is_all_counted(stats: storm.OffloadStats) -> bool:
    """Return whether each saved byte was kept, offloaded or recomputed; a store may still run."""
    parts = (stats.skipped_bytes, stats.deduplicated_bytes, stats.offloaded_bytes, stats.kept_bytes)
    return stats.saved_bytes == sum(parts) + stats.replayed_bytes


def test_the_plan_says_what_becomes_of_what(
    device: str, client: storm.Client, tmp_path: Path
) -> None:
    net, x = blocks(device), seeded(device, 32, WIDTH)
    offload = client.offload(net, min_bytes=1)
    assert offload.plan is None
    for _ in range(2):
        step(net, x, lambda: offload)
    plan = offload.plan
    decisions = {row.operation: row.decision for row in plan.rows}
    assert decisions["silu"] == decisions["mul"] == decisions["layer_norm"] == "replay"
    assert "3 x silu" in str(plan)
    assert plan.replay_seconds > 0
    pytest.importorskip("matplotlib", reason="a picture is drawn with it")
    plan.draw(tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    with pytest.raises(storm.UsageError, match=r"plan\.nothing"):
        plan.draw(tmp_path / "plan.nothing")


@torch.library.custom_op("storm_tests::scaled", mutates_args=())
def scaled(x: Tensor, scale: float) -> Tensor:
    """An operator of the user's own, which its name does not tell."""
    return x * (scale + CALLS[0])


CALLS = [0]


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.scale = inputs[1]


def _backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
    return slope * ctx.scale, None


scaled.register_autograd(_backward, setup_context=_save)


@pytest.mark.parametrize(
    ("spelled", "changes"),
    [(None, False), (scaled, True), (torch.ops.storm_tests.scaled, False)],
)
def test_an_operator_of_the_users_own(
    spelled: Callable[..., Tensor] | None, changes: bool, device: str, client: storm.Client
) -> None:
    """It is run again if that is allowed, and no more once it was found to be another each time."""
    CALLS[0] = 0
    x = seeded(device, 32, WIDTH, grad=True)
    offload = client.offload(min_bytes=1, replay=True if spelled is None else [spelled])
    for _ in range(4):
        with offload:
            base = x * 2
            loss = (scaled(base, 3.0).square() * base.square()).sum()
        CALLS[0] += changes
        loss.backward()
    decisions = {row.operation: row.decision for row in offload.plan.rows}
    if spelled is None:
        assert not any("scaled" in operation for operation in decisions)
    elif changes:
        assert "other bits" in " ".join(rejected(offload).values())
    else:
        assert decisions["storm_tests::scaled"] == "replay"


class Pair(NamedTuple):
    """What a script returns two results in."""

    first: Tensor
    second: Tensor


class Results(list[Tensor]):
    """A list of the script's own."""


@pytest.mark.parametrize("holding", [None, Pair, lambda *results: Results(results)])
def test_what_an_input_is_made_from_serves_where_that_is_changed_later(
    holding: Callable[[Tensor, Tensor], Any] | None, device: str, client: storm.Client
) -> None:
    """Also in lists and tuples of any kind; the step is like those in which replays were tried."""
    weight = nn.Parameter(seeded(device, 32, WIDTH))
    offload = client.offload(min_bytes=1)

    def train(context: Context, changes: bool) -> list[Tensor]:
        weight.grad = None
        with context():
            h = weight * 2
            made = torch.cat(holding(h, weight * 3)) if holding else h + 1
            loss = made.square().sum()
            del made
            if changes:
                h.add_(3)
            loss = loss + h.sum()
        loss.backward()
        return [loss.detach(), weight.grad]

    assert_later_steps_are_identical(train, offload)
    assert offload.stats().replayed_bytes > 0
    assert not rejected(offload)


class Edges(nn.Module):
    """Each node adds up what its edges send, of both their ends; the first layer reads a batch."""

    def __init__(self, sources: Tensor) -> None:
        super().__init__()
        self.edge = nn.Linear(2 * WIDTH, WIDTH)
        self.sources = sources
        self.targets = torch.arange(NODES, device=sources.device).repeat_interleave(EDGES)

    def forward(self, x: Tensor) -> Tensor:
        sent = silu(self.edge(torch.cat([x[self.sources], x[self.targets]], -1)))
        return sent.view(NODES, EDGES, WIDTH).sum(1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("writes", [False, True])
def test_what_a_block_makes_of_a_batch_is_recomputed_as_well(
    writes: bool, path: str, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a gradient. Then other data is written to the batch, as loaders do."""
    followed = follow_by(path, monkeypatch)
    torch.manual_seed(0)
    sources = torch.randint(NODES, (NODES * EDGES,)).to(device)
    net = nn.Sequential(*(Edges(sources) for _ in range(3))).to(device)
    batch = seeded(device, NODES, WIDTH)
    offload = client.offload(min_bytes=2048, codec="raw", budget="least")

    def train(context: Context, seed: int) -> list[Tensor]:
        batch.copy_(seeded(device, NODES, WIDTH, seed=seed))
        net.zero_grad()
        with context():
            loss = net(batch).square().mean()
            if writes:
                batch.data.zero_()
        loss.backward()
        return [loss.detach().clone(), *(gradient.clone() for gradient in gradients(net))]

    for seed in range(4 * STEPS):
        expected = train(nullcontext, seed)
        assert_identical(train(lambda: offload, seed), expected)
    plan = offload.plan
    assert plan is not None
    gathers = [one for one in plan.rows if "__getitem__" in one.operation]
    assert [one.decision for one in gathers] == ["replay"] * 2 * len(net)
    assert followed[-1] is (path == "compiled")


def test_a_parameter_that_is_changed_raises(device: str, client: storm.Client) -> None:
    """Unlike PyTorch, which needs the norm's weight no more: an exception, and no wrong bits."""
    net, x = blocks(device, 2), seeded(device, 32, WIDTH)
    offload = client.offload(net, min_bytes=1)
    for _ in range(3):
        step(net, x, lambda: offload)
    with offload:
        loss = net(x).square().mean()
    with torch.no_grad():
        net[1].norm.bias.add_(1)
    with pytest.raises((storm.ActivationLost, RuntimeError), match=r"changed in place|modified by"):
        loss.backward()


@pytest.mark.parametrize("path", PATHS)
def test_a_small_parameter_is_read_where_it_is(
    path: str, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = follow_by(path, monkeypatch)
    net, x = blocks(device, 3), seeded(device, 32, WIDTH)
    offload = client.offload(net, min_bytes=1024)
    assert_steps_are_identical(lambda context: step(net, x, context), offload)
    with offload:
        loss = net(x).square().mean()
    with torch.no_grad():
        net[1].norm.bias.add_(1)
    with pytest.raises(storm.ActivationLost, match="changed in place"):
        loss.backward()
    assert followed[-1] is (path == "compiled")


class Shifted(nn.Module):
    """A norm whose bias others may write to without a version counting it."""

    def __init__(self, kind: str, device: str) -> None:
        super().__init__()
        self.norm, self.product = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to(device)
        bias = torch.zeros(2 * WIDTH, device=device)
        if kind == "buffer":
            del self.norm.bias
            self.norm.register_buffer("bias", bias[:WIDTH].clone())
        elif kind == "shared":
            self.norm.bias.data = bias[:WIDTH].clone().share_memory_()
        else:
            self.norm.bias.data = bias[WIDTH:]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(self.norm(x))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["buffer", "shared", "flat"])
def test_a_small_tensor_that_may_change_uncounted_is_copied(
    kind: str, path: str, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a flat parameter, too: FSDP frees such memory between the passes."""
    if kind == "shared" and device == "cuda":
        pytest.skip("GPU memory counts as shared in any case")
    followed = follow_by(path, monkeypatch)
    torch.manual_seed(0)
    net = nn.Sequential(*(Shifted(kind, device) for _ in range(3)))
    x, offload = seeded(device, 32, WIDTH), client.offload(net, min_bytes=1024)

    def train(context: Context) -> list[Tensor]:
        net.zero_grad()
        with context():
            loss = net(x).square().mean()
        for one in net:
            one.norm.bias.data.add_(1)
        loss.backward()
        for one in net:
            one.norm.bias.data.zero_()
        return [loss.detach().clone(), *(gradient.clone() for gradient in gradients(net))]

    assert_steps_are_identical(train, offload)
    norms = [one.decision for one in offload.plan.rows if one.operation == "layer_norm"]
    assert norms == ["replay"] * len(net)
    assert followed[-1] is (path == "compiled")


def test_verify_always_notices_uncounted_writes(device: str, client: storm.Client) -> None:
    net, x = blocks(device, 2), seeded(device, 32, WIDTH)
    offload = client.offload(net, min_bytes=1, verify="always")
    for _ in range(3):
        step(net, x, lambda: offload)
    with offload:
        loss = net(x).square().mean()
    net[1].norm.weight.data.mul_(2)
    with pytest.raises(storm.ActivationLost, match="other bits"):
        loss.backward()


class Sideways(nn.Module):
    """A product of a transposed norm, as in PyTorch's attention where the batch comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(self.norm(x).transpose(0, 1)).transpose(0, 1).sigmoid()


@pytest.mark.parametrize("path", PATHS)
def test_copies_of_casts_of_arguments_with_other_strides(
    path: str, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd saves the copy, and nobody the cast."""
    followed = follow_by(path, monkeypatch)
    torch.manual_seed(0)
    net = nn.Sequential(*(Sideways() for _ in range(3))).to(device)
    x, offload = seeded(device, 4, 8, WIDTH), client.offload(net, min_bytes=1)

    def train(context: Context) -> list[Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16):
            return step(net, x, context)

    assert_steps_are_identical(train, offload)
    cast = {row.operation: row.decision for row in offload.plan.rows if row.dtype is torch.bfloat16}
    assert cast["to"] == cast["reshape"] == "replay"
    assert "unknown" not in cast
    assert not rejected(offload)
    assert any(followed) == followed.may_be_compiled


@pytest.mark.parametrize("changes", [True, False])
def test_casts_that_autocast_has_kept(
    changes: bool, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of what parameters were when they were made, which they may not be any more."""
    monkeypatch.setattr(plan_maker, "machine_of", lambda _: CPU)  # so no products are recomputed
    net, x = blocks("cpu"), seeded("cpu", 32, WIDTH)
    offload = client.offload(net, min_bytes=1)

    def train(context: Context, is_second: bool) -> list[Tensor]:
        net.zero_grad()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if is_second:
                with context():
                    first = net(x).float().square().mean()
                first.backward()
            if is_second and changes:
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(1.25)
            with context():
                loss = net(x).float().square().mean()
        loss.backward()
        found = [loss.detach(), *(gradient.clone() for gradient in gradients(net))]
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), before, strict=True):
                parameter.copy_(value)
        return found

    assert_later_steps_are_identical(train, offload)
    casts = [row for row in offload.plan.rows if row.operation == "to"]
    weights = {p.shape for p in net.parameters() if p.dim() == 2}
    decisions = {row.decision for row in casts if row.shape in weights}
    assert decisions == (set() if changes else {"replay"})


OTHER_SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "number of threads": one_thread_more,
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "deterministic_algorithms": OTHERS["deterministic"],
    "precision of float32": OTHERS["products on a CPU"],
}


def sums_and_convolutions(
    context: Context, setting: AbstractContextManager[object]
) -> list[Tensor]:
    """Have a forward pass in a setting that decides its bits on a CPU."""
    weight = nn.Parameter(seeded("cpu", 4, 8, 120, 120))
    kernel = nn.Parameter(seeded("cpu", 8, 8, 3, 3))
    with context(), setting:
        loss = conv2d(weight * 2, kernel).square().sum()
        loss = loss + (weight * 2).mean().expand(8).square().sum()
    loss.backward()
    return [loss.detach(), weight.grad, kernel.grad]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_settings_that_are_others_in_the_forward_pass_raise_or_nothing_is_recomputed(
    name: str, path: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, other = follow_by(path, monkeypatch), OTHER_SETTINGS[name]
    for first in (other, nullcontext):
        offload = client.offload(min_bytes=1)
        expected = sums_and_convolutions(nullcontext, first())
        for _ in range(STEPS):
            assert_identical(sums_and_convolutions(lambda: offload, first()), expected)  # noqa: B023
        said = "settings of PyTorch" in " ".join(rejected(offload).values())
        assert said is (first is other)
    with pytest.raises(storm.ActivationLost, match=f"to be recomputed: {name}; have them"):
        sums_and_convolutions(lambda: offload, other())
    assert followed[-1] is followed.may_be_compiled


def test_products_are_recomputed_where_attention_is_set_for_the_forward_pass_alone(
    client: storm.Client,
) -> None:
    """Such a block around the model is PyTorch's own example; products do not read what it sets."""
    weight = nn.Parameter(seeded("cpu", 64, 64))

    def train(context: Context) -> list[Tensor]:
        weight.grad = None
        with context(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            x = (weight * 2) @ weight
            heads = x.view(1, 4, 16, 64)
            attended = scaled_dot_product_attention(heads, heads, heads).view(64, 64)
            later = (attended.sigmoid() @ weight).tanh().square()
            loss = (later @ (x @ weight).sin()).sum()
        loss.backward()
        return [loss.detach(), weight.grad]

    offload = client.offload(min_bytes=1)
    assert_steps_are_identical(train, offload)
    recomputed = {row.operation for row in offload.plan.rows if row.decision == "replay"}
    assert recomputed >= {"matmul", "sigmoid", "tanh", "square"}
    assert "scaled_dot_product_attention" not in recomputed
    assert "settings of PyTorch" in " ".join(rejected(offload).values())


def train_in(
    backward: Callable[[Callable[[], None]], Any], context: Context
) -> tuple[list[Tensor], list[int]]:
    """Return gradients and the count of the thread that `backward` runs the backward pass in.

    oneDNN's convolutions go by that count, and few functions set it where tensors are small.
    """
    counts = []
    kernels = [nn.Parameter(seeded("cpu", 16, 16, 3, 3)) for _ in range(3)]
    x = seeded("cpu", 2, 16, 16, 16)
    with context():
        for kernel in kernels:
            x = silu(conv2d(x, kernel))
        loss = x.square().sum()

    def run() -> None:
        loss.backward()
        counts.append(omp_threads())

    backward(run)
    return [kernel.grad for kernel in kernels if kernel.grad is not None], counts


def in_a_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_backward_pass_in_a_thread_of_its_own_finds_that_as_it_is(client: storm.Client) -> None:
    """PyTorch gives a thread its count where it first shares work there, and not before."""
    offload = client.offload(min_bytes=1, verify="always")
    with one_thread():
        expected, counts = train_in(in_a_thread, nullcontext)
        for _ in range(STEPS):
            gradients, found = train_in(in_a_thread, lambda: offload)
            assert_identical(gradients, expected)
            assert found == counts
    assert offload.stats().replayed_bytes == 0
    assert "the thread itself" in str(offload.plan)


@pytest.mark.parametrize("path", PATHS)
def test_a_backward_pass_that_moves_to_another_thread_raises(
    path: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = follow_by(path, monkeypatch)
    offload = client.offload(min_bytes=1)
    for _ in range(STEPS):
        train_in(lambda function: function(), lambda: offload)
    assert offload.stats().replayed_bytes > 0
    raised: list[BaseException] = []

    def backward(function: Callable[[], None]) -> None:
        def run() -> None:
            try:
                function()
            except storm.ActivationLost as error:
                raised.append(error)

        in_a_thread(run)

    train_in(backward, lambda: offload)
    assert "to be recomputed: the thread itself, on a CPU" in str(raised[0])
    assert "oneDNN" not in str(raised[0])
    assert followed[-1] is followed.may_be_compiled


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_parts_of_pytorch_that_a_script_replaces_later(
    where: str, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(seeded(device, 32, WIDTH))
    offload = client.offload(min_bytes=1)

    def steeper(x: Tensor) -> Tensor:
        return x.exp().neg()

    def train(context: Context, is_replaced: bool) -> list[Tensor]:
        weight.grad = None
        with monkeypatch.context() as patch:
            if is_replaced and where == "forward":
                patch.setattr(torch._C._nn, "silu", steeper)
            with context():
                loss = silu((weight * 2).add(1)).square().sum()
            if is_replaced and where == "backward":
                patch.setattr(torch._C._nn, "silu", steeper)
            loss.backward()
        return [loss.detach(), weight.grad]

    assert_later_steps_are_identical(train, offload)
    assert offload.stats().replayed_bytes > 0


def test_lists_among_arguments_are_those_of_the_forward_pass(client: storm.Client) -> None:
    weight, shape = nn.Parameter(seeded("cpu", 32, WIDTH)), [WIDTH]
    offload = client.offload(min_bytes=1)

    def train(context: Context, is_changed: bool) -> list[Tensor]:
        weight.grad, shape[:] = None, [WIDTH]
        with context():
            loss = layer_norm((weight * np.float64(0.5)).sin(), shape).sin().square().sum()
        if is_changed:
            shape[:] = [1]
        loss.backward()
        return [loss.detach(), weight.grad]

    assert_later_steps_are_identical(train, offload)
    plan = offload.plan
    assert {"mul", "layer_norm"} <= {row.operation for row in plan.rows if row.decision == "replay"}


def test_what_lies_otherwise_than_pytorchs_own_memory_is_not_recorded(
    client: storm.Client,
) -> None:
    weight = nn.Parameter(seeded("cpu", 32, WIDTH))
    memory = np.zeros(32 * WIDTH * 4 + 64, np.uint8)
    begin = -memory.ctypes.data % 64 + 4
    x = torch.from_numpy(memory[begin : begin + 32 * WIDTH * 4].view(np.float32))
    x = x.view(32, WIDTH).copy_(seeded("cpu", 32, WIDTH))
    offload = client.offload(min_bytes=1)

    def train(context: Context) -> list[Tensor]:
        weight.grad = None
        with context():
            loss = (x * weight).sin().square().sum()
        loss.backward()
        return [loss.detach(), weight.grad]

    assert_steps_are_identical(train, offload)
    decisions = {row.operation: row.decision for row in offload.plan.rows}
    assert decisions.get("mul") != "replay"


@pytest.mark.parametrize("where", ["around a block", "below autograd", "in the backward pass"])
def test_modes_that_alter_functions_later_alter_no_replay(
    where: str, device: str, client: storm.Client
) -> None:
    """The step in which one is on is like those in which replays were tried."""
    weight = nn.Parameter(seeded(device, 32, WIDTH))
    offload = client.offload(min_bytes=1)

    def train(context: Context, is_altered: bool) -> list[Tensor]:
        weight.grad = None
        with ExitStack() as stack:
            if is_altered and where == "around a block":
                stack.enter_context(SteeperSlopes())
            stack.enter_context(context())
            if is_altered and where == "below autograd":
                stack.enter_context(ScaledBelow())
            loss = silu(leaky_relu(weight * 2).add(1)).square().sum()
        backward = (
            ScaledBelow() if is_altered and where == "in the backward pass" else nullcontext()
        )
        with backward:
            loss.backward()
        return [loss.detach(), weight.grad]

    assert_later_steps_are_identical(train, offload)
    assert offload.stats().replayed_bytes > 0


@pytest.mark.parametrize("transform", ["vmap", "jvp", "functionalize"])
def test_within_function_transforms_nothing_is_watched(
    transform: str, device: str, client: storm.Client
) -> None:
    """Tensors have no memory of their own there."""
    linear, x = nn.Linear(WIDTH, WIDTH, device=device), seeded(device, 16, WIDTH)

    def forward(row: Tensor) -> Tensor:
        y = silu(torch.relu(linear(row)) * 2, inplace=True)
        return layer_norm(nn.functional.dropout(y, 0.1), x.shape[-1:]).softmax(-1).exp()

    transformed: dict[str, Callable[[], Tensor]] = {
        "vmap": lambda: torch.vmap(forward, randomness="different")(x).sum(),
        "jvp": lambda: sum(one.sum() for one in torch.func.jvp(forward, (x,), (x,))),
        "functionalize": lambda: torch.func.functionalize(forward)(x).sum(),
    }

    def trained(context: Context) -> list[Tensor]:
        linear.zero_grad()
        torch.manual_seed(0)
        with context():
            loss = transformed[transform]() + forward(x).sum()
        loss.backward()
        return [loss.detach(), *gradients(linear)]

    expected, offload = trained(nullcontext), client.offload(min_bytes=1)
    for _ in range(STEPS):
        assert_identical(trained(lambda: offload), expected)
    assert offload.stats().offloaded_bytes > 0


def test_a_block_around_a_loop_is_watched_only_so_far(
    device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storm_client.eager.recognition.MAX_EVENTS", 100)
    net, x = blocks(device), seeded(device, 32, WIDTH)
    expected = step(net, x, nullcontext)
    offload = client.offload(net, min_bytes=1)
    with offload:
        for _ in range(20):
            assert_identical(step(net, x, nullcontext), expected)
        recorder = _get_current_function_mode()
        assert isinstance(recorder, Recorder)
        assert not recorder._recording.pins.storages
    assert not signatures(offload)


class Branching(nn.Module):
    """Two blocks, between which a step may do something else; sizes are the same on all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.way = "plain"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        a, b = self.first.gate(x), self.first.up(x)
        if self.way == "exchanged":
            a, b = b, a
        if self.way == "in place":
            a = (a + 1).mul_(2)
        y = silu(a) * (b.tanh() if self.way == "another function" else b.sigmoid())
        turned = (y.t() if self.way == "copied" else y.clone()).contiguous()
        y = turned.t() * 2 if self.way == "copied" else turned * 2
        if self.way == "ends early":
            return y
        return self.last(self.first.down(y))


WAYS = ("plain", "exchanged", "in place", "another function", "copied", "ends early")


@pytest.mark.parametrize("other", WAYS[1:])
def test_steps_part_in_the_middle(other: str, device: str, client: storm.Client) -> None:
    torch.manual_seed(0)
    net, x = Branching().to(device), seeded(device, 32, WIDTH)
    ways = ["plain"] * 3 + [other, "plain"] + [other] * 3 + ["plain", other, "plain", "plain"]
    expected = {}
    for net.way in ("plain", other):
        expected[net.way] = step(net, x, nullcontext)
    offload = client.offload(net, min_bytes=1)
    replayed = dict.fromkeys(expected, 0)
    for net.way in ways:
        before = offload.stats().replayed_bytes
        assert_identical(step(net, x, lambda: offload), expected[net.way])
        replayed[net.way] = offload.stats().replayed_bytes - before
    assert all(replayed.values()), replayed


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_take_turns(seed: int, device: str, client: storm.Client) -> None:
    offload = client.offload(min_bytes=1, verify="always" if seed % 2 else "learn")
    seeds = [3 * seed, 3 * seed + 1, 3 * seed + 2]
    expected = {one: run(one, device, nullcontext) for one in seeds}
    for number in range(24):
        one = seeds[number % 3 if number < 6 else number % 2]
        assert_identical(run(one, device, lambda: offload), expected[one])
    assert offload.stats().replayed_bytes > 0


def fail(net: nn.Module, x: Tensor) -> None:
    net(x)
    raise ZeroDivisionError


def test_nothing_is_left_of_blocks_that_an_exception_ends(
    device: str, client: storm.Client
) -> None:
    net, x = blocks(device), seeded(device, 32, WIDTH)
    expected = step(net, x, nullcontext)
    offload = client.offload(net, min_bytes=1)
    for _ in range(3):
        step(net, x, lambda: offload)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), offload:
            fail(net, x)
        assert torch._C._len_torch_function_stack() == 0
    assert_identical(step(net, x, lambda: offload), expected)
    gc.collect()
    offload._planning._free_pins()
    assert not offload._planning._pinned


@pytest.mark.parametrize("budget", [0.3, 1.0, "64KiB"])
def test_budgets(budget: str | float, device: str, client: storm.Client) -> None:
    net, x = blocks(device), seeded(device, 32, WIDTH)
    expected = step(net, x, nullcontext)
    offload = client.offload(net, min_bytes=1, budget=budget)
    for _ in range(STEPS):
        assert_identical(step(net, x, lambda: offload), expected)
    plan = offload.plan
    saved = sum(row.nbytes for row in plan.rows)
    limits = {0.3: 0.3 * saved, 1.0: saved, "64KiB": 1 << 16}
    assert plan.peak_bytes <= limits[budget]
    assert plan.peak_bytes >= limits[budget] / 2
    if budget == 1.0:
        assert offload.stats().skipped["budget"] > 0


def test_a_budget_that_cannot_be_kept(device: str, client: storm.Client) -> None:
    net, x = blocks(device), seeded(device, 32, WIDTH)
    offload = client.offload(net, min_bytes=1, budget=1000)
    step(net, x, lambda: offload)
    with pytest.raises(storm.UsageError, match=r"1000 B.*16\.0 KiB, which is the least possible"):
        step(net, x, lambda: offload)


def test_a_budget_that_longer_batches_outgrow(
    device: str, client: storm.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Training does not end in the middle: the steps keep as little as possible."""
    net, x = blocks(device), seeded(device, 32, WIDTH)
    offload = client.offload(net, min_bytes=1, budget=4 * x.nbytes)
    for batch in (x, x, x, x.repeat(16, 1), x.repeat(16, 1), x.repeat(16, 1), x):
        expected = step(net, batch, nullcontext)
        assert_identical(step(net, batch, lambda: offload), expected)
    said = [one.levelname for one in caplog.records if "least possible" in one.message]
    assert said == ["WARNING"]


def test_the_budget_of_the_environment(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMD_BUDGET", "0.5")
    assert client.offload()._planning.options.budget == 0.5
    assert client.offload(budget="fit")._planning.options.budget == "fit"
    monkeypatch.setenv("STORMD_BUDGET", "some")
    with pytest.raises(storm.UsageError, match="budget is 'some'"):
        client.offload()
