"""Attention that no kernel computes as a whole: what it is computed by is recomputed by itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.planner.plan import Plan
from support.following import PATHS, Followed, follow_by
from support.planning import replay_all
from support.training import Context, assert_identical, seeded
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

HEADS, LENGTH, WIDTH = 4, 24, 32
STEPS = 8
LEAST = 1024

INSIDE = {"_safe_softmax", "matmul", "mul"}
"""By what every such attention is computed."""

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def followed(path: str, monkeypatch: pytest.MonkeyPatch) -> Followed:
    replay_all(monkeypatch)
    return follow_by(path, monkeypatch)


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


def encoder(device: str, *, biased: bool = True, layers: int = 2, **options: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder([Attention(**options) for _ in range(layers)], biased=biased).to(device)


def step(net: nn.Module, x: Tensor, context: Context = nullcontext) -> list[Tensor]:
    """Return the loss, the gradients and what is drawn after the step."""
    net.zero_grad()
    torch.manual_seed(7)
    with context():
        loss = net(x)
    loss.backward()
    gradients = [one.grad for one in net.parameters() if one.grad is not None]
    return [loss.detach(), *gradients, torch.rand(4, device=x.device)]


def recomputed(plan: Plan | None) -> set[str]:
    """Return by which operations something is recomputed; nothing large may be of unknown origin."""
    assert plan is not None
    return {row.operation for row in plan.rows if row.decision == "replay"}


KINDS: dict[str, dict[str, Any]] = {
    "bias": {},
    "dropout": {"dropout_p": 0.2},
    "scale": {"scale": 0.3},
    "scale below zero": {"scale": -0.3},
    "groups": {"groups": 2, "enable_gqa": True},
    "causal": {"is_causal": True, "dropout_p": 0.2, "biased": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps(
    kind: str, dtype: torch.dtype, device: str, client: storm.Client, path: str, followed: Followed
) -> None:
    net = encoder(device, **KINDS[kind]).to(dtype)
    x = seeded(device, 3, LENGTH, WIDTH).to(dtype)
    expected = step(net, x)
    offload = client.offload(net, min_bytes=LEAST)
    for _ in range(STEPS):
        assert_identical(step(net, x, lambda: offload), expected)
    print("KIND", kind, path, dtype, followed, followed.left, recomputed(offload.plan))
    for r in offload.plan.rows:
        if r.operation=="unknown": print("UNK", r)
    assert recomputed(offload.plan) >= INSIDE
    assert followed[-1] == (path == "compiled")
