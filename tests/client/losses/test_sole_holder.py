"""A gradient is written over what was saved where nobody else can read it, and nowhere else."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from support.following import follow_by
from support.same_bits import set_tiles
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiles(monkeypatch, 4096)


TARGET = torch.arange(40)
SOURCES = {
    "result": lambda leaf: leaf * 2,
    "view": lambda leaf: (leaf * 2).view(40, 300),
    "linear": lambda leaf: F.linear(leaf.view(4, 10, 300), torch.eye(300)).view(-1, 300),
    "view of view": lambda leaf: (leaf * 2).flatten().view(40, 300),
}
HOLDERS = {
    "variable": lambda logits: logits,
    "view": lambda logits: logits[3:],
    "view of all": lambda logits: logits.view(-1),
    "detached": lambda logits: logits.detach(),
    "base": lambda logits: logits if logits._base is None else logits._base,
    "storage": lambda logits: logits.untyped_storage(),
    "numpy": lambda logits: logits.detach().numpy(),
    "weak reference": weakref.ref,
    "operation": lambda logits: logits.square().sum(),
    "operation on a view": lambda logits: logits[:2].square().sum(),
    "closure": lambda logits: lambda: logits,
}


def gradient_is_in_place(
    source: Callable[[Tensor], Tensor],
    hold: Callable[[Tensor], object] = lambda _: None,
    **backward: Any,
) -> bool:
    """Tell whether the gradient had the logits' memory; check it, and what is held."""
    torch.manual_seed(3)
    leaf = torch.randn(40, 300, requires_grad=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(source(leaf), TARGET), leaf)
    logits = source(leaf)
    address, before, seen = logits.data_ptr(), logits.detach().clone(), []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss = storm.cross_entropy(logits, TARGET)
    held = hold(logits)
    del logits
    (found,) = torch.autograd.grad(loss, leaf, **backward)
    assert torch.equal(found.detach(), expected)
    if isinstance(held, Tensor) and held.shape == before.shape:
        assert torch.equal(held, before)
    return seen == [address]


@pytest.mark.parametrize("source", SOURCES)
def test_the_gradient_takes_memory_that_nobody_else_holds(source: str) -> None:
    assert gradient_is_in_place(SOURCES[source])


@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.parametrize("source", SOURCES)
def test_memory_that_somebody_holds_is_left_alone(source: str, hold: str) -> None:
    assert not gradient_is_in_place(SOURCES[source], HOLDERS[hold])


@pytest.mark.parametrize(
    "source",
    [
        lambda leaf: leaf.exp(),  # whose result it saves
        lambda leaf: leaf.view(40, 300),
        lambda leaf: (leaf * 2).t().contiguous().t(),
        lambda leaf: torch.from_numpy(np.zeros((40, 300), np.float32)).add_(leaf),
    ],
    ids=["saved result", "view of a leaf", "other layout", "memory of NumPy's"],
)
def test_memory_that_is_another_s_is_left_alone(source: Callable[[Tensor], Tensor]) -> None:
    assert not gradient_is_in_place(source)


@pytest.mark.parametrize("backward", ["retain_graph", "create_graph"])
def test_memory_of_a_graph_that_is_kept_is_left_alone(backward: str) -> None:
    assert not gradient_is_in_place(SOURCES["result"], **{backward: True})


def test_logits_that_were_offloaded_while_a_script_has_them_are_left_alone(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, offload = follow_by("compiled", monkeypatch), client.offload(min_bytes=1024)
    torch.manual_seed(3)
    inputs = torch.randn(40, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 300))
    for _ in range(8):
        with offload:
            logits = model(inputs)
            loss = F.cross_entropy(logits, TARGET)
        offload.stats()  # waits until they have been offloaded
        before = logits.detach().clone()
        loss.backward()
        assert torch.equal(logits, before)
    assert followed[-1]
