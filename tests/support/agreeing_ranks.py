"""A rank of a job whose costs are its own, which reports the plans that its steps have followed.

    python agreeing_ranks.py RANK WORLD FILE ADDRESS CASE

Prints, as JSON, the digests of the decisions that each step began with, by the signature's steps,
and whether losses and gradients are identical to those of training without offload.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from contextlib import nullcontext
from typing import Any

import storm_client as storm
import torch
import torch.distributed as dist
from storm_client.eager import operation_times, ranks
from storm_client.eager.signature import Kind, RecordedValue
from storm_client.planner.agreement import Limits
from storm_client.planner.decisions import Decision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, STEPS = 64, 64, 24


def net(layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Tanh(),
                      nn.Linear(4 * WIDTH, WIDTH), nn.Sigmoid())
        for _ in range(layers)
    ]  # fmt: skip
    return nn.Sequential(*blocks)


class Seen:
    """Notes the decisions of a signature's steps, and makes each rank's costs its own."""

    def __init__(self, rank: int) -> None:
        self.followed: list[str] = []
        self.made: list[str] = []
        planned = RecordedValue.planned

        def with_costs(value: RecordedValue) -> Any:
            """Every second rank finds recomputation dear, the others cheap."""
            found = planned(value)
            seconds = 1.0 if (rank + value.number) % 2 else 1e-9
            return type(found)(
                **{name: getattr(found, name) for name in found.__slots__} | {"seconds": seconds}
            )

        RecordedValue.planned = with_costs  # type: ignore[method-assign]

    def step(self, offload: storm.Offload) -> None:
        plan = offload.plan
        rows = [] if plan is None else [(row.operation, row.decision) for row in plan.rows]
        self.followed.append(hashlib.sha256(repr(rows).encode()).hexdigest()[:8] if rows else "")


def train(model: nn.Module, offload: Any, seen: Seen | None, rank: int, case: str) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + rank)
    found = []
    for number in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        if case == "late" and rank == 1 and number < 12:
            context: Any = nullcontext()
        else:
            context = offload
        if case == "killed" and seen is not None and rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with context:
            loss = model(x).square().mean()
        if seen is not None:
            seen.step(offload)
        loss.backward()
        found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if case == "killed":
            time.sleep(0.01)
    return found


def main() -> None:
    rank, world, file, address, case = *map(int, sys.argv[1:3]), *sys.argv[3:]
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("storm_client").addHandler(handler)
    if case in ("killed", "late"):
        ranks.LIMITS = Limits(seconds=0.2, steps=4, forming_steps=2)
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world)
    layers = 2 + rank if case == "stages" else 3
    together = case in ("costs", "late")

    def made() -> nn.Module:
        model = net(layers)
        return DistributedDataParallel(model) if together else model

    plain = train(made(), nullcontext(), None, rank, case)
    seen = Seen(rank)
    with storm.connect(address, embedded="never", timeout=30.0) as client:
        model = made()
        offload = client.offload(model, min_bytes=1024)
        planned = train(model, offload, seen, rank, case)
        pairs = zip(plain, planned, strict=True)
        result = {
            "followed": seen.followed,
            "same": all(torch.equal(one, other) for one, other in pairs),
            "recomputed": offload.stats().replayed_bytes,
            "messages": [one for one in messages if "plans for itself" in one],
        }
        print(json.dumps(result), flush=True)
        if case != "killed":
            dist.barrier()
    if case != "killed":
        dist.destroy_process_group()
    else:
        os._exit(0)


if __name__ == "__main__":
    main()
