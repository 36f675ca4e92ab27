"""One of two processes that train a sharded model with Accelerate, without offload and with it.

    python accelerate_ranks.py RANK FILE ADDRESS

Prints, as JSON by case, the first value that differs, or what left and how the model was sharded.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

RANKS, STEPS = 2, 2
CASES: dict[str, dict[str, Any]] = {
    "every_layer": {},
    "recomputed_too": {"activation_checkpointing": True},
}
MIN_BYTES = 4096


def main() -> None:
    """Train as `accelerate launch` would have it, on processors."""
    rank, file, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # not used: a file tells more
    os.environ.update(ACCELERATE_USE_CPU="true")
    import storm_client as storm
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    with storm.connect(address, embedded="never", timeout=30.0) as client:
        results = {name: _compared(settings, client) for name, settings in CASES.items()}
        print(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


def _compared(settings: dict[str, Any], client: Any) -> dict[str, Any]:
    import torch

    expected, _, _ = _trained(settings, None)
    found, offload, shards = _trained(settings, client)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            return {"differs": index}
    stats = offload.stats()
    return {
        "offloaded_bytes": stats.offloaded_bytes,
        "skipped": dict(stats.skipped),
        "kept": dict(stats.kept),
        "shards": shards,
    }


def _trained(settings: dict[str, Any], client: Any) -> tuple[list[Any], Any, int]:
    """Return losses and the weights' shards as bytes can be compared, and how many are shards."""
    import torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from storm_client.integrations.accelerate import auto_wrapped_layers, offload_only
    from support.tiny_llama import tiny_llama, token_rows
    from torch.distributed.tensor import DTensor

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **settings
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    # Accelerate takes the plugin where there is a GPU alone; what it then does needs none.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = tiny_llama(layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(token_rows(2 * 2 * STEPS), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    offload = None
    if client is not None:
        offload = client.offload(model, min_bytes=MIN_BYTES)
        offload_only(offload, auto_wrapped_layers(accelerator, model))
    losses = [one.reshape(1) for one in train(accelerator, model, optimizer, loader, offload)]
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    return [*losses, *(one.detach().flatten() for one in shards)], offload, len(shards)


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, offload: Any) -> list[Any]:
    """Train on every batch, without offload where it is None; return the losses."""
    from storm_client.integrations.accelerate import accumulate

    losses = []
    for batch in loader:
        context: AbstractContextManager[object] = (
            accelerator.accumulate(model)
            if offload is None
            else accumulate(accelerator, offload, model)
        )
        with context:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


if __name__ == "__main__":
    main()
