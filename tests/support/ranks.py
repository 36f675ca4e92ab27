"""One of two processes that train a model together, with and without offload, and compare.

    python ranks.py RANK FILE ADDRESS

Prints, as JSON, the reasons for which saved tensors stayed and the bytes that left, by case, once
every loss and every gradient has been found identical in both runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import storm_client as storm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

RANKS, STEPS, ACCUMULATED = 2, 2, 2
WIDTH, ROWS, LAYERS = 64, 32, 3


class Block(nn.Module):
    """What a transformer's MLP does: a norm, an activation, two matrices and a residual."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(recomputes=recomputes) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def data_parallel() -> nn.Module:
    return DistributedDataParallel(Net())


def data_parallel_buckets() -> nn.Module:
    """Gradients are views of the buckets that are reduced, which are many here."""
    return DistributedDataParallel(Net(), gradient_as_bucket_view=True, bucket_cap_mb=0.01)


def data_parallel_static() -> nn.Module:
    return DistributedDataParallel(Net(recomputes=True), static_graph=True)


def sharded(net: Net | None = None, **options: Any) -> nn.Module:
    net = Net() if net is None else net
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def sharded_in_bfloat16() -> nn.Module:
    return sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def sharded_with_parameters_on_the_host() -> nn.Module:
    return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))


def sharded_and_kept_whole() -> nn.Module:
    return sharded(reshard_after_forward=False)


def sharded_and_recomputed() -> nn.Module:
    return sharded(Net(recomputes=True))


class UnderAutocast(Net):
    """Casts its weights, so that copies of them are saved, which are no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def sharded_under_autocast() -> nn.Module:
    return sharded(UnderAutocast())


def sharded_as_before() -> nn.Module:
    """FSDP of the first version, which keeps flat parameters."""
    return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)


CASES: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make
    for make in (
        data_parallel,
        data_parallel_buckets,
        data_parallel_static,
        sharded,
        sharded_in_bfloat16,
        sharded_with_parameters_on_the_host,
        sharded_and_kept_whole,
        sharded_and_recomputed,
        sharded_under_autocast,
        sharded_as_before,
    )
}


def train(net: nn.Module, context: AbstractContextManager[object]) -> list[Tensor]:
    """Return every loss, and every gradient as it was before each of the optimizer's steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        for micro_batch in range(ACCUMULATED):
            is_last = micro_batch == ACCUMULATED - 1
            x = torch.randn(ROWS, WIDTH, generator=generator)
            with unsynchronized(net, is_last=is_last):
                with context:
                    loss = net(x.exp()).float().square().mean()
                loss.backward()
            found.append(loss.detach())
        found += [local(p.grad).clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def unsynchronized(net: nn.Module, *, is_last: bool) -> AbstractContextManager[object]:
    """Have gradients reduced with the last micro-batch alone, where the model can do that."""
    if hasattr(net, "set_requires_gradient_sync"):
        net.set_requires_gradient_sync(is_last)
        return nullcontext()
    static = getattr(net, "static_graph", False)
    return nullcontext() if is_last or static else net.no_sync()


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def identical(one: Tensor, other: Tensor) -> bool:
    same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_kind and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


def compared(make: Callable[[], nn.Module], client: storm.Client) -> dict[str, Any]:
    plain = train(make(), nullcontext())
    saved = []
    for layers in (Block, ()):  # named, each is called again in the backward pass
        net = make()
        offload = client.offload(net, min_bytes=1024, layers=layers)
        for index, (one, other) in enumerate(zip(train(net, offload), plain, strict=True)):
            if not identical(one, other):
                return {"differs": index}
        stats, signature = offload.stats(), offload._planning._signatures.latest
        saved.append(stats.saved_bytes)
        values = [] if signature is None else signature.root.values
    return {
        "named_saved_bytes": saved[0],
        "saved_bytes": saved[1],
        "offloaded_bytes": stats.offloaded_bytes,
        "gathered_bytes": sum(value.gathered_bytes for value in values),
        "parameter_bytes": sum(value.parameter_bytes for value in values),
        "skipped": dict(stats.skipped),
        "kept": dict(stats.kept),
    }


def main() -> None:
    rank, file, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    with storm.connect(address, embedded="never", timeout=30.0) as client:
        results = {}
        for name, make in CASES.items():
            try:
                results[name] = compared(make, client)
            except Exception as error:  # noqa: BLE001 - the test shows it
                results[name] = {"error": repr(error)}
        print(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
