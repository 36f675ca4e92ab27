"""Liger's functions on a GPU: what their kernels make is recomputed bit for bit, by both paths."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.hooks import StepHooks
from support.following import PATHS, follow_by
from support.planning import replay_all
from support.training import assert_identical
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

ROWS, WIDTH, HEADS, STEPS = 256, 256, 4, 10


class Layer(nn.Module):
    """A layer of a Llama: its norm, rotary embedding and gated product are Liger's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        norm: Any = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        rope: Any = import_module("liger_kernel.ops.rope").LigerRopeFunction
        gate: Any = import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
        y = norm.apply(x, self.scale, 1e-6, 0.0, "llama", False)
        q, k, v = (one(y).view(1, ROWS, HEADS, WIDTH // HEADS).transpose(1, 2) for one in self.qkv)
        q, k = rope.apply(q, k, cos, sin)
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + made.transpose(1, 2).reshape(x.shape)
        y = norm.apply(x, self.scale, 1e-6, 0.0, "llama", False)
        return x + self.down(gate.apply(*(one(y) for one in self.up)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", PATHS)
def test_what_ligers_kernels_make_is_recomputed(
    path: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel")
    followed = follow_by("compiled", monkeypatch)
    if path == "python":
        monkeypatch.setattr(StepHooks, "_native_counts", lambda *_: None)
    replay_all(monkeypatch)
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(2)).cuda().bfloat16()
    x = torch.randn(1, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(1, ROWS, WIDTH // HEADS, device="cuda", dtype=torch.bfloat16)
    cos, sin = angles.cos(), angles.sin()

    def step(context: AbstractContextManager[object]) -> list[Tensor]:
        layers.zero_grad()
        with context:
            y = x
            for layer in layers:
                y = layer(y, cos, sin)
            loss = y.float().square().mean()
        del y
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in layers.parameters() if p.grad is not None)]

    expected = step(nullcontext())
    offload = client.offload(layers, min_bytes=4096)
    for _ in range(STEPS):
        assert_identical(step(offload), expected)
    for kernel in ("_rms_norm_forward_kernel", "_swiglu_forward_kernel", "_triton_rope"):
        made = {row.decision for row in offload.plan.rows if row.operation == kernel}
        assert made == {"replay"}, offload.plan
    assert "other bits" not in str(offload.plan)
    assert followed[-1] == (path == "compiled")
