"""A graph holds what it has stored, and what it was given back, no longer than it uses it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from storm_client.compile import runtime, tokens
from support.compiled_programs import PLAIN
from support.training import assert_identical, gradients, seeded
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

LAYERS = 8


class Watch:
    """How many storages that passed through a function were alive at once."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []
        self.most = 0

    def saw(self, tensor: Tensor) -> None:
        self.seen.append(StorageWeakRef(tensor.untyped_storage()))
        self.most = max(self.most, sum(not one.expired() for one in self.seen))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, client: storm.Client) -> Watch:
    watch, store = Watch(), runtime.store

    def watched(value: Tensor, number: int, *, shared: bool) -> Tensor:
        token = store(value, number, shared=shared)
        client._supply.sessions.settle(30.0)  # from here on the daemon has it
        if not shared:
            watch.saw(value)
        return token

    monkeypatch.setattr(runtime, "store", watched)
    return watch


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch, wait = Watch(), runtime.wait

    def watched(token: Tensor, *arguments: object) -> Tensor:
        found = wait(token, *arguments)
        if not isinstance(tokens.TOKENS.content(token), tokens.SharedParameter):  # parameters stay
            watch.saw(found)
        return found

    monkeypatch.setattr(runtime, "wait", watched)
    return watch


@pytest.mark.parametrize("codegen", [pytest.param("inductor", marks=pytest.mark.slow), "eager"])
def test_stored_values_live_until_their_last_use(
    codegen: str, client: storm.Client, stored: Watch, brought: Watch
) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(LAYERS)))
    call = storm.compile(net, client=client, budget=0.0, min_bytes=1 << 12, codegen=codegen)
    call(seeded("cpu", 64, 64)).square().mean().backward()
    torch._dynamo.reset()
    # the last result is the caller's and stays; of the others every second is made from these
    assert len(stored.seen) >= (LAYERS - 1) // 2
    assert stored.most <= 2
    assert len(brought.seen) >= LAYERS // 2
    assert brought.most <= 3


class Attention(nn.Module):
    """Queries, keys and values lie in one tensor, and none of them is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).split(32, -1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("codegen", [pytest.param("inductor", marks=pytest.mark.slow), "eager"])
def test_views_of_one_product_leave_as_the_product(codegen: str, client: storm.Client) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Attention()
    expected = gradients_of(torch.compile(net, backend=PLAIN[codegen]), net)
    torch._dynamo.reset()
    call = storm.compile(net, client=client, budget=0.0, min_bytes=1, codegen=codegen)
    assert_identical(gradients_of(call, net), expected)
    torch._dynamo.reset()
    (plan,) = storm.compiled_plans(call)
    assert not [row for row in plan.rows if row.reason == "cannot be offloaded" and row.nbytes]
    assert [math.prod(row.shape) for row in plan.rows].count(2 * 8 * 96) == 1


class Returning(Attention):
    """The caller gets the product as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.qkv(x)
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in product.split(32, -1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True), product


class Partial(nn.Module):
    """Only a sixth of a product is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x)[..., 16:32].sin()


@pytest.mark.parametrize("net", [Returning(), Partial()], ids=["returned", "a part"])
def test_a_product_that_is_not_saved_whole_does_not_leave(
    net: nn.Module, client: storm.Client
) -> None:
    """In the one case the caller may write to it, in the other more would leave than is needed."""
    torch._dynamo.reset()
    call = storm.compile(net, client=client, budget=0.0, min_bytes=1, codegen="eager")
    found = call(seeded("cpu", 2, 8, 32))
    (found[0] if isinstance(found, tuple) else found).square().mean().backward()
    torch._dynamo.reset()
    (plan,) = storm.compiled_plans(call)
    assert not [row for row in plan.rows if math.prod(row.shape) == 2 * 8 * 96]


def gradients_of(call: Callable[..., Tensor], net: nn.Module) -> list[Tensor]:
    net.zero_grad()
    call(seeded("cpu", 2, 8, 32)).square().mean().backward()
    return gradients(net)
