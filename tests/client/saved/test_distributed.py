"""What is saved of DTensors leaves as plain tensors do, and changes of it raise as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import storm_client as storm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from storm_client.policy import Policy
from support.following import PATHS, follow_by
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SIDE, STEPS = 64, 10
REPLICATED = [Replicate()]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone; what gloo keeps open goes with the last one that knows of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def values(seed: int) -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def parameter(seed: int, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(values(seed), mesh, [Shard(0)]))


def among_distributed(x: Tensor, weight: Tensor, mesh: DeviceMesh) -> Tensor:
    """Save what operations on DTensors have made, a mask that gets no gradient among it."""
    whole = DTensor.from_local(x, mesh, REPLICATED)
    hidden = F.gelu(whole @ weight).tanh()
    hidden = hidden.masked_fill(hidden > 0.5, 0.0).view(-1, 2).sigmoid().view(SIDE, SIDE)
    return (hidden @ weight.t()).sum().to_local()


def between_plain(x: Tensor, weight: Tensor, mesh: DeviceMesh) -> Tensor:
    """Save DTensors of what operations on plain tensors have made, as tensor parallelism does."""
    for _ in range(2):
        hidden = F.gelu(F.layer_norm(x, (SIDE,)))
        x = x + (DTensor.from_local(hidden, mesh, REPLICATED) @ weight).to_local()
    return x.square().sum()


def gathered_late(x: Tensor, weight: Tensor, mesh: DeviceMesh) -> Tensor:
    """Save one whose local tensor is still to be waited for."""
    gathered = AsyncCollectiveTensor(x.detach() + 1)
    whole = DTensor.from_local(gathered, mesh, REPLICATED, run_check=False)
    return (whole @ weight).square().sum().to_local()


def written_to(x: Tensor, weight: Tensor, mesh: DeviceMesh) -> Tensor:
    """Save what was written over since operations on plain tensors have made and saved it."""
    whole = DTensor.from_local(x.tanh(), mesh, REPLICATED)
    whole = whole.mul_(2).flatten().view(SIDE, SIDE)
    return (whole @ weight).square().sum().to_local()


PROGRAMS = {one.__name__: one for one in (among_distributed, between_plain, gathered_late)}


def train(
    program: Callable[..., Tensor], context: AbstractContextManager[object], mesh: DeviceMesh
) -> list[Tensor]:
    weight, found = parameter(0, mesh), []
    for step in range(STEPS):
        x = values(step + 1).requires_grad_()
        with context:
            loss = program(x, weight, mesh)
        loss.backward()
        assert isinstance(weight.grad, DTensor)
        found += [loss.detach(), weight.grad.to_local()]
        found += [] if x.grad is None else [x.grad]
        weight.grad = None
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "budget"),
    [("among_distributed", "least"), ("between_plain", 0.4), ("gathered_late", "least")],
)
def test_all_but_parameters_leaves_or_is_recomputed(
    name: str,
    budget: str | float,
    path: str,
    mesh: DeviceMesh,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed = follow_by(path, monkeypatch)
    offload = client.offload(min_bytes=1024, budget=budget)
    expected = train(PROGRAMS[name], nullcontext(), mesh)
    assert all(map(torch.equal, train(PROGRAMS[name], offload, mesh), expected))
    stats = offload.stats()
    assert "subclass" not in stats.skipped
    assert ("parameter" in stats.skipped) is (name != "gathered_late")
    assert stats.offloaded_bytes > 0
    assert (stats.replayed_bytes > 0) is (name == "between_plain")
    assert followed[-1] is followed.may_be_compiled


def change(whole: Tensor) -> None:
    whole.add_(1)


def change_an_alias(whole: Tensor) -> None:
    whole.detach().zero_()


@pytest.mark.parametrize("change", [change, change_an_alias])
def test_a_change_raises_as_in_pytorch(
    change: Callable[[Tensor], None], mesh: DeviceMesh, client: storm.Client
) -> None:
    messages = []
    for context in (nullcontext(), client.offload(min_bytes=1)):
        x = distribute_tensor(values(0), mesh, [Shard(0)]).requires_grad_()
        with context:
            made = x * 3
            loss = made.sin().sum()
        change(made)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            loss.backward()
        messages.append(str(raised.value).partition(", which is output")[0])
    assert messages[0] == messages[1]


def test_what_was_written_to_is_not_taken_for_what_it_was(
    mesh: DeviceMesh, client: storm.Client
) -> None:
    offload = client.offload(min_bytes=1024)
    expected = train(written_to, nullcontext(), mesh)
    assert all(map(torch.equal, train(written_to, offload, mesh), expected))
    assert offload.stats().skipped["subclass"] == STEPS


def test_small_parameters_are_at_rest_unless_one_is_sharded(mesh: DeviceMesh) -> None:
    """FSDP2 computes with others, which it gathers for a block and frees behind it."""
    plain, part = nn.LayerNorm(SIDE), nn.LayerNorm(SIDE)
    part.weight = parameter(0, mesh)
    for modules, is_at_rest in (([plain], True), ([plain, part], False)):
        policy = Policy(modules, 1 << 20)
        policy._look_up()
        assert policy.is_at_rest(plain.bias) is is_at_rest
        assert not policy.is_at_rest(torch.zeros(SIDE))
