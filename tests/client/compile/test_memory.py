"""A graph holds what it has stored, and what it was given back, no longer than it uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from storm_client.compile import runtime
from support.compiled_programs import blocks
from support.training import seeded
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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

    def watched(value: Tensor, number: int, *, lent: bool) -> Tensor:
        token = store(value, number, lent=lent)
        client._supply.sessions.settle(30.0)  # from here on the daemon has it
        if not lent:
            watch.saw(value)
        return token

    monkeypatch.setattr(runtime, "store", watched)
    return watch


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch, wait = Watch(), runtime.wait

    def watched(*arguments: object) -> Tensor:
        watch.saw(found := wait(*arguments))
        return found

    monkeypatch.setattr(runtime, "wait", watched)
    return watch


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_stored_values_live_until_their_last_use(
    codegen: str, client: storm.Client, stored: Watch, brought: Watch
) -> None:
    torch._dynamo.reset()
    layers: Callable[..., nn.Module] = lambda: nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
    net = nn.Sequential(*(layers() for _ in range(LAYERS)))
    call = storm.compile(net, client=client, budget=0.0, min_bytes=1 << 12, codegen=codegen)
    call(seeded("cpu", 64, 64)).square().mean().backward()
    torch._dynamo.reset()
    assert len(stored.seen) >= LAYERS - 1
    assert stored.most <= 3
    assert len(brought.seen) >= LAYERS - 1
    assert brought.most <= 3


def test_views_of_one_product_leave_as_the_product(client: storm.Client) -> None:
    """Queries, keys and values lie in one tensor, and none of them is dense."""
    torch._dynamo.reset()
    call = storm.compile(blocks("cpu", 1), client=client, budget=0.0, min_bytes=1, codegen="eager")
    call(seeded("cpu", 2, 8, 32)).square().mean().backward()
    torch._dynamo.reset()
    (plan,) = storm.compiled_plans(call)
    assert not [row for row in plan.rows if row.reason == "cannot leave" and row.nbytes]
    assert [row.shape for row in plan.rows].count((16, 96)) == 1
