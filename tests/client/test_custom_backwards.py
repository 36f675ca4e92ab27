"""Backward passes of custom functions, and scripts, that write to saved tensors uncounted.

Saved tensors that share the memory show the writes, as in PyTorch, also in a second pass over the
graph. Tensors that are recomputed from it do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import storm_client as storm
import torch
from support.comparing import Plain, Way
from support.devices import DEVICES
from support.following import PATHS, follow_by
from support.planning import replay_all
from support.training import assert_identical, seeded
from torch import Tensor

SIDE = 64
STEPS = 9
"""The plan is followed after five."""

Forward: TypeAlias = Callable[[Tensor], list[Tensor]]
"""Returns the terms of a loss. Their backward passes run in the reverse order."""


class Overwriting(torch.autograd.Function):
    """Its backward pass writes to what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = slope * x
        x.data.fill_(5.0)
        return gradient


def recomputed(x: Tensor) -> list[Tensor]:
    """Of two tensors made from a recomputed one, autograd asks for one after the write."""
    made = x.sin()
    later = (made * 1.3).tanh()
    return [later.exp().sum(), Overwriting.apply(made).sum(), (made * 2).sum()]


def given(x: Tensor) -> list[Tensor]:
    """What is overwritten is what the others are recomputed from."""
    later = (x * 1.1).tanh()
    return [later.exp().square().sum(), Overwriting.apply(x).sum()]


def small(x: Tensor) -> list[Tensor]:
    """What is overwritten is smaller than what is offloaded."""
    scale = x.mean(1, keepdim=True) * 2
    later = (x * scale).tanh()
    return [later.exp().square().sum(), Overwriting.apply(scale).sum()]


def run(forward: Forward, way: Way, device: str, *, passes: int = 1) -> list[Tensor]:
    weight = seeded(device, SIDE, SIDE, grad=True)
    with way:
        terms = forward(seeded(device, SIDE, SIDE, seed=1) * weight)
        loss = torch.stack(terms).sum()
    terms.clear()
    for last in range(passes, 0, -1):
        loss.backward(retain_graph=last > 1)
    assert weight.grad is not None
    return [loss.detach(), weight.grad]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("forward", [recomputed, given, small])
def test_a_backward_pass_that_writes_to_what_it_has_saved(
    forward: Forward,
    passes: int,
    device: str,
    path: str,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_all(monkeypatch)
    followed = follow_by(path, monkeypatch)
    expected = run(forward, Plain(), device, passes=passes)
    offload = client.offload(min_bytes=SIDE * SIDE, budget="least")
    for _ in range(STEPS):
        assert_identical(run(forward, offload, device, passes=passes), expected)
    assert offload.stats().replayed_bytes > 0
    assert followed[-1] == followed.may_be_compiled


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_script_that_writes_to_what_an_operation_has_saved(
    device: str, path: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(way: Way) -> list[Tensor]:
        weight = seeded(device, SIDE, SIDE, grad=True)
        with way:
            made = (seeded(device, SIDE, SIDE, seed=1) * weight).sin()
            square = made.square()
            later = (made * 1.3).tanh()
            loss = square.sum() + later.exp().sum()
            del made, later
        held: Any = square.grad_fn
        held = held._saved_self
        held.data[0] = 7.0
        loss.backward()
        assert weight.grad is not None
        return [loss.detach(), weight.grad]

    replay_all(monkeypatch)
    follow_by(path, monkeypatch)
    expected = step(Plain())
    offload = client.offload(min_bytes=SIDE * SIDE, budget="least")
    for _ in range(STEPS):
        assert_identical(step(offload), expected)
    assert offload.stats().replayed_bytes > 0


class Sparse(torch.autograd.Function):
    """Saves a tensor without a storage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().to_sparse())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slope * x.to_dense().cos()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_sparse_tensor_that_a_custom_function_saves(
    device: str, path: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = lambda x: [Sparse.apply(x * 1.5).tanh().sum()]  # noqa: E731
    replay_all(monkeypatch)
    follow_by(path, monkeypatch)
    expected = run(sparse, Plain(), device)
    offload = client.offload(min_bytes=SIDE * SIDE, budget="least")
    for _ in range(STEPS):
        assert_identical(run(sparse, offload, device), expected)
