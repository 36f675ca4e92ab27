"""A rank of a job with costs of its own, which reports the plans that its steps have followed.

    python agreeing_ranks.py RANK WORLD STORE ADDRESS CASE

with alike, compared, sharded, stages, late, killed-0 or killed-1 for CASE. Where it sees GPUs each
rank trains on one of them, with costs as they are.

Prints, as JSON, a digest of the plan that each step has followed, and whether every loss and every
gradient is identical to that of training without offload.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final

import storm_client as storm
import torch
import torch.distributed as dist
from storm_client.eager import controller, ranks
from storm_client.eager.signature import Kind, RecordedValue
from storm_client.eager.step_times import Duration, StepTimes
from storm_client.planner.agreement import Limits
from storm_client.planner.machine import CPU
from storm_client.planner.problem import Value
from storm_client.planner.search import OFFLOAD_ALONE, Alternative
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

IS_ON_GPU: Final = torch.cuda.is_available()
WIDTH, ROWS = (2048, 4096) if IS_ON_GPU else (64, 64)
STEPS: Final = 96 if IS_ON_GPU or sys.argv[-1] == "compared" else 32
"""Where plans are compared, so many that all of them are."""
JOINS: Final = 12
"""The step from which on the last rank offloads, in the case "late"."""

DIES: Final = 3
"""The step that the rank does not reach which is killed."""

LIMITS: Final = Limits(seconds=0.2, steps=4, forming_steps=2)
"""Where a rank is late or killed."""


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Tanh(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Sigmoid(),
        )


def model_of(case: str, rank: int) -> nn.Module:
    """Return what a rank trains: with "stages" the first two the same, and the third another."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3 + (case == "stages") * (rank // 2))))
    if IS_ON_GPU:
        model = model.to(torch.device("cuda", rank))
    if case == "sharded":
        for block in model:
            fully_shard(block)
        return fully_shard(model)
    return DistributedDataParallel(model) if case in ("alike", "compared", "late") else model


def use_costs_of(rank: int) -> None:
    """Have every second operation be dear on one rank, and the others on the next."""
    planned = RecordedValue.planned

    def with_costs(value: RecordedValue) -> Value:
        return replace(planned(value), seconds=1.0 if (rank + value.number) % 2 else 1e-9)

    RecordedValue.planned = with_costs  # type: ignore[method-assign]


def compare_as_on_a_gpu(rank: int) -> None:
    """Have plans be compared, and each rank be faster by another one: together one of them is."""
    machine = replace(CPU, link=1e-7, codec=1e-9, thread_store=1e-9, thread_recompute=1e-6)
    kind: Any = Kind
    kind.is_on_gpu = property(lambda _: True)
    changed: Any = controller
    changed.give_back_unused = lambda _: None
    changed.machine_of = lambda _: machine
    times: Any = StepTimes
    times.wants_full_queue = property(lambda _: False)
    known = times.took

    def took(self: StepTimes, alternative: Alternative, _: Duration) -> None:
        slow = 0.3 if rank else 0.1
        known(self, alternative, Passed(0.2 if alternative == OFFLOAD_ALONE else slow))

    times.took = took


class Passed:
    is_known = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds


def train(
    model: nn.Module, rank: int, case: str, offload: storm.Offload | None = None
) -> tuple[list[Tensor], list[str]]:
    """Return each loss and the last gradients, and a digest of the plan of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + rank)
    found, followed = [], []
    for number in range(STEPS):
        if offload is not None:
            meet(rank, case, number)
        context: AbstractContextManager[object] = offload or nullcontext()
        if case == "late" and rank == dist.get_world_size() - 1 and number < JOINS:
            context = nullcontext()
        rows = ROWS
        if case == "alike":  # batches of lengths of their own
            rows -= int(torch.randint(0, 3, (1,), generator=generator)) * ROWS // 8
        x = torch.randn(rows, WIDTH, generator=generator)
        x = x.to(torch.device("cuda", rank)) if IS_ON_GPU else x
        with context:
            loss = model(x).square().mean()
            if offload is not None:
                followed.append(digest(offload))
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        if number < STEPS - 1:
            optimizer.zero_grad()
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    return [*found, *map(local, gradients)], followed


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def meet(rank: int, case: str, number: int) -> None:
    """Begin a step together where nothing else makes ranks wait for each other; or be killed."""
    if case.startswith("killed") and number == DIES:
        if case == f"killed-{rank}":
            os.kill(os.getpid(), signal.SIGKILL)
    elif case.startswith("killed") and number > DIES:
        time.sleep(LIMITS.seconds / 8)  # so that the rest of the steps take longer than that
    elif case == "stages" or (case.startswith("killed") and number < DIES):
        dist.barrier()


def digest(offload: storm.Offload) -> str:
    """Return what the plan decides for each value; empty where there is none."""
    plan = offload.plan
    if plan is None:
        return ""
    decisions = [(row.operation, row.decision) for row in plan.rows]
    return hashlib.sha256(repr(decisions).encode()).hexdigest()[:8]


class Messages(logging.Handler):
    """Those that tell that a rank goes on alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        logging.getLogger("storm_client").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "plans for itself" in record.getMessage():
            self.found.append(record.getMessage())


def main() -> None:
    rank, world = map(int, sys.argv[1:3])
    store, address, case = sys.argv[3:]
    messages = Messages()
    if case == "late" or case.startswith("killed"):
        ranks.LIMITS = LIMITS
    if IS_ON_GPU:
        torch.cuda.set_device(rank)
    backend = "nccl" if IS_ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)
    plain, _ = train(model_of(case, rank), rank, case)
    if case == "compared":
        compare_as_on_a_gpu(rank)
    elif not IS_ON_GPU:
        use_costs_of(rank)
    with storm.connect(address, embedded="never", timeout=30.0) as client:
        model = model_of(case, rank)
        offload = client.offload(model, min_bytes=1024)
        planned, followed = train(model, rank, case, offload)
        result = {
            "same": all(map(torch.equal, plain, planned)),
            "followed": followed,
            "compared": offload.plan.compared if offload.plan else "",
            "offloaded_bytes": offload.stats().offloaded_bytes,
            "messages": messages.found,
        }
        print(json.dumps(result), flush=True)
    if case.startswith("killed"):
        os._exit(0)  # there is nobody to say farewell to
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
