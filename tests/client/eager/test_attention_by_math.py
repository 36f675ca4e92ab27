"""Attention that no kernel computes as a whole: what it is computed by is recomputed by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.planner.plan import Plan
from support.following import Followed
from support.training import Context, assert_identical, seeded
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS, LENGTH, WIDTH = 4, 24, 32
STEPS = 8
LEAST = 1024

INSIDE = {"_safe_softmax", "matmul", "mul"}
"""By what every such attention is computed."""

pytestmark = pytest.mark.usefixtures("compiled")


class Attention(nn.Module):
    """Attention with a bias that is learnt, between projections."""

    def __init__(self, groups: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH * groups // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.groups = groups
        self.options = options

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2 * self.groups, -1).transpose(1, 2).chunk(2, 1)
        options = {"attn_mask": bias, **self.options}
        made = scaled_dot_product_attention(q, k, v, **options)
        return x + self.out(made.transpose(1, 2).reshape(batch, length, WIDTH))


class Encoder(nn.Module):
    """Layers that share a bias, as T5's do."""

    def __init__(self, layers: list[Attention], *, biased: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.table = nn.Embedding(2 * LENGTH, HEADS) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        if self.table is not None:
            at = torch.arange(x.shape[1], device=x.device)
            bias = self.table(at[:, None] - at + LENGTH).permute(2, 0, 1)[None] * 1.5
            bias = bias.to(x.dtype)
        for layer in self.layers:
            x = layer(x, bias)
        return x.square().mean()


def encoder(*, biased: bool = True, layers: int = 2, **options: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder([Attention(**options) for _ in range(layers)], biased=biased)


def step(net: nn.Module, x: Tensor, context: Context = nullcontext) -> list[Tensor]:
    """Return the loss, the gradients and what is drawn after the step."""
    net.zero_grad()
    torch.manual_seed(7)
    with context():
        loss = net(x)
    loss.backward()
    gradients = [one.grad for one in net.parameters() if one.grad is not None]
    return [loss.detach(), *gradients, torch.rand(4, device=loss.device)]


def recomputed(plan: Plan | None) -> set[str]:
    """Return by which operations something is recomputed."""
    return {row.operation for row in plan.rows if row.decision == "replay"}


def unknown(plan: Plan | None, *, but: Sequence[tuple[int, ...]]) -> list[object]:
    """Return what no operation is known of, but tensors of some shapes, which none has made."""
    return [
        row
        for row in plan.rows
        if row.operation == "unknown" and row.dtype.is_floating_point and row.shape not in but
    ]


class Autocast(nn.Module):
    """A network under autocast."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.net(x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """An attention that a kernel computes as a whole, before and behind another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = encoder(layers=1)
        self.first, self.last = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x, None)
        return self.encoder(y) + self.last(y, None).square().mean()


class ByItself(nn.Module):
    """What math there is, called by its own name, also in a custom function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        q = self.first(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        made = self.function(q, q.sin()).transpose(1, 2).reshape(x.shape)
        return self.last(made).square().mean()


def by_name(q: Tensor, k: Tensor) -> Tensor:
    made: Tensor = torch._scaled_dot_product_attention_math(q, k, k, None, 0.2)[0]
    return made


class Own(torch.autograd.Function):
    """An attention whose gradient is not asked of its inside."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        made = scaled_dot_product_attention(q.double(), k.double(), k.double(), dropout_p=0.2)
        ctx.save_for_backward(made, q)
        return made.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        made, q = ctx.saved_tensors
        return gradients[0] * made.float(), gradients[0] * q


class T5(nn.Module):
    """A small one, whose tokens are its own."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 100, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2}
        tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
        config = transformers.T5Config(**sizes, **tokens, num_heads=HEADS)
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        self.net = transformers.T5ForConditionalGeneration(config)
        self.register_buffer("tokens", torch.randint(2, 99, (3, LENGTH)))

    def forward(self, _: Tensor) -> Tensor:
        return self.net(input_ids=self.tokens, labels=self.tokens).loss  # type: ignore[no-any-return]


DROPPED = {"dropout", "dropout mask"}

NETS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "bias": (encoder, INSIDE),
    "dropout": (lambda: encoder(dropout_p=0.2), INSIDE | DROPPED),
    "scale": (lambda: encoder(scale=0.3).double(), INSIDE),
    "scale below zero": (lambda: encoder(scale=-0.3), INSIDE),
    "groups": (lambda: encoder(groups=2, enable_gqa=True), INSIDE),
    "causal": (
        lambda: encoder(is_causal=True, dropout_p=0.2, biased=False).double(),
        INSIDE | DROPPED,
    ),
    "bfloat16": (lambda: encoder(dropout_p=0.2).bfloat16(), {*INSIDE, *DROPPED, "to"}),
    # Arguments are cast to bfloat16, and those to float32, where autocast is off.
    "autocast": (lambda: Autocast(encoder(dropout_p=0.2)), {*INSIDE, *DROPPED, "to"}),
    "beside a kernel": (Mixed, {*INSIDE, "scaled_dot_product_attention"}),
    "by name": (lambda: ByItself(by_name), {"matmul"}),
    "in a function": (lambda: ByItself(Own.apply), {"matmul"}),
    "T5": (T5, INSIDE | DROPPED),
}
"""What is trained, and operations of which something is recomputed in it."""


@pytest.mark.parametrize(
    ("name", "path"),
    [*((name, "compiled") for name in NETS), ("dropout", "python"), ("autocast", "python")],
)
def test_steps(name: str, device: str, client: storm.Client, path: str, followed: Followed) -> None:
    make, operations = NETS[name]
    net = make().to(device)
    x = seeded(device, 3, LENGTH, WIDTH).to(next(net.parameters()).dtype)
    is_chosen = device == "cuda" and isinstance(net, Encoder)  # a GPU has a kernel for some
    with sdpa_kernel(SDPBackend.MATH) if is_chosen else nullcontext():
        plan = train(net, x, client)
    assert recomputed(plan) >= operations
    if isinstance(net, (Encoder, Autocast)):
        none_made = [x.shape, (x.shape[0] * x.shape[1], WIDTH), (LENGTH, LENGTH)]
        assert not unknown(plan, but=none_made)
    assert not followed.left
    if not isinstance(net, ByItself):
        assert followed[-1] == (path == "compiled")


def train(net: nn.Module, x: Tensor, client: storm.Client, **options: Any) -> Plan | None:
    """Compare steps with those without offload; return the plan that the last has followed."""
    expected = step(net, x)
    offload = client.offload(net, **{"min_bytes": LEAST, **options})
    for _ in range(STEPS):
        assert_identical(step(net, x, lambda: offload), expected)
    return offload.plan


def test_attention_that_is_computed_otherwise_in_some_steps(
    device: str, client: storm.Client, followed: Followed
) -> None:
    """By a kernel where its bias needs no gradient, and where nothing is dropped."""
    net, x = encoder().to(device), seeded(device, 3, LENGTH, WIDTH)
    offload = client.offload(net, min_bytes=LEAST)
    for number in range(4 * STEPS):
        net.table.requires_grad_(number // 5 % 2 == 0)  # type: ignore[union-attr]
        for layer in net.layers:
            layer.options["dropout_p"] = 0.2 * (number // 7 % 2)
        assert_identical(step(net, x, lambda: offload), step(net, x))
    assert len(followed) == 4 * STEPS


def test_batches_of_many_sizes(
    device: str, client: storm.Client, path: str, followed: Followed
) -> None:
    net = encoder(dropout_p=0.2).to(device)
    offload = client.offload(net, min_bytes=LEAST)
    for number in range(3 * STEPS):
        x = seeded(device, 2 + number % 5, 16 + number * 5 % 9, WIDTH)
        assert_identical(step(net, x, lambda: offload), step(net, x))
    assert recomputed(offload.plan) >= {*INSIDE, "dropout", "dropout mask"}
    assert followed[-1] == (path == "compiled")


def test_each_step_verified(device: str, client: storm.Client, followed: Followed) -> None:
    net, x = encoder(dropout_p=0.2).to(device), seeded(device, 3, LENGTH, WIDTH)
    assert recomputed(train(net, x, client, verify="always")) >= INSIDE | DROPPED
    assert not any(followed)


class Writing(nn.Module):
    """Attentions of which what they have read and made is written over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.sin().mul_(2)
        q, k, v = (one.clone() for one in self.first(x).chunk(3, -1))
        a = scaled_dot_product_attention(q, k, v, bias, 0.2)
        q.mul_(0.5)
        k.tanh_()
        bias.add_(1)
        b = scaled_dot_product_attention(q, k, v, bias, 0.2)
        b.mul_(a).relu_()
        return self.last(a * 2 + b).square().mean()


@pytest.mark.parametrize("least", [1, 5000])
def test_what_is_written_over(
    least: int, device: str, client: storm.Client, path: str, followed: Followed
) -> None:
    torch.manual_seed(0)
    net, x = Writing().to(device), seeded(device, 3, LENGTH, WIDTH)
    plan = train(net, x, client, min_bytes=least)
    is_mask_small = least > 1 and device != "cpu"  # of bytes there, of numbers here
    masks = set() if is_mask_small else {"dropout mask"}
    assert recomputed(plan) >= {"_safe_softmax", "dropout", *masks}
    assert followed[-1] == (path == "compiled")
    assert not followed.left


class Failing(nn.Module):
    """An attention before an encoder, which fails inside if that is asked for."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.fails = False
        self.encoder = encoder(dropout_p=0.2).to(device)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            bias = torch.zeros(1, HEADS, LENGTH, LENGTH + 1, device=x.device, requires_grad=True)
            self.encoder.layers[0](x, bias)
        return self.encoder(x)  # type: ignore[no-any-return]


def test_an_exception_inside(
    device: str, client: storm.Client, path: str, followed: Followed
) -> None:
    net, x = Failing(device), seeded(device, 3, LENGTH, WIDTH)
    expected = step(net, x)
    offload = client.offload(net, min_bytes=LEAST)
    for number in range(3 * STEPS):
        net.fails = number % 7 == 3
        if net.fails:
            with pytest.raises(RuntimeError, match=r"size of (the )?tensor"):
                step(net, x, lambda: offload)
        else:
            assert_identical(step(net, x, lambda: offload), expected)
    assert recomputed(offload.plan) >= {*INSIDE, "dropout", "dropout mask"}
