"""Trains a network sharded by FSDP2, the activations of each rank kept by stormd.

    stormd serve --pool-bytes 4GiB &
    torchrun --nproc-per-node 2 client/examples/fsdp.py

The ranks of a node share the daemon; where none runs each starts one of its own. --plain trains
without; the losses are the same.
"""

import argparse

import storm_client as storm
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

KIND = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, ROWS, LENGTH, WIDTH, LAYERS = 4, 4, 256, 256, 4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("nccl" if KIND == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if KIND == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, nhead=4, batch_first=True, norm_first=True, device=KIND)
        for _ in range(LAYERS)
    ]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh(KIND, (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = None if args.plain else storm.offload(model)
    for step in range(STEPS):
        torch.manual_seed(1 + rank + ranks * step)
        x = torch.randn(ROWS, LENGTH, WIDTH, device=KIND)
        if offload is None:
            loss = model(x).square().mean()
        else:
            with offload:
                loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}, rank {rank}: loss {loss.item():.6f}", flush=True)
    if offload is not None and rank == 0:
        print(offload.stats(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
