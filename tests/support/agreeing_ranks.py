"""A rank of a job with costs of its own, which reports the plans that its steps have followed.

    python agreeing_ranks.py RANK WORLD STORE ADDRESS CASE [CASE ...]

with alike, again, sharded, flat, tensor_parallel, compared, stages, late, killed-0 or killed-1 for
CASE; after late and killed comes no other, and after compared a kill alone. Where it sees GPUs each
rank trains on one of them, with costs as they are.

Prints, as JSON, a line for each case: a digest of the plan that each step has followed, and whether
every loss and every gradient is identical to that of training without offload.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import storm_client as storm
import torch
import torch.distributed as dist
from storm_client.eager import controller, plan_maker, ranks
from storm_client.eager.events import RecordedValue
from storm_client.eager.signature import StepSignature
from storm_client.eager.step_times import StepTimes
from storm_client.planner.agreement import Limits
from storm_client.planner.machine import CPU, TransferFigures
from storm_client.planner.problem import Value
from storm_client.planner.search import OFFLOAD_ALONE, Alternative
from storm_client.planner.slowest import Agreed
from storm_client.transport.daemon_loss import Supply
from support.planning import Took
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

IS_ON_GPU: Final = torch.cuda.is_available()
WIDTH, ROWS = (2048, 4096) if IS_ON_GPU else (64, 64)
STEPS: Final = 96 if IS_ON_GPU else 32
FEW_STEPS: Final = 12
"""Enough to agree on a plan and follow it, in the cases "flat" and "tensor_parallel"."""
STEPS_TO_COMPARE: Final = 100
"""Where plans are compared, so many that all of them are, twice."""
SHARES: Final = 50
"""The step from which on the last rank's link is three times as slow, in the case "compared"."""
LEAVES: Final = 10
"""The step before which ranks destroy their process group and make another, in the case "again"."""
JOINS: Final = 12
"""The step from which on the last rank offloads, in the case "late"."""

DIES: Final = 3
"""The step that the rank does not reach which is killed."""

COMPARED: Final[list[str]] = []
"""How far the comparison of plans has come in each step of a case."""

IN_TURN: Final[list[int]] = []
"""How many plans each decision of this rank makes all ranks follow, one after another."""

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
    device = torch.device("cuda", rank) if IS_ON_GPU else torch.device("cpu")
    model = model.to(device)
    if case == "sharded":
        for block in model:
            fully_shard(block)
        return fully_shard(model)
    if case == "flat":
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    if case == "tensor_parallel":
        return tensor_parallel(model)
    return DistributedDataParallel(model) if case in ("alike", "compared", "late") else model


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    """Have ranks hold rows of what lies between blocks, and columns inside of them."""
    mesh = init_device_mesh("cuda" if IS_ON_GPU else "cpu", (dist.get_world_size(),))
    rows = Shard(0)
    for block in model:
        parallelize_module(
            block,
            mesh,
            {
                "0": SequenceParallel(sequence_dim=0),
                "1": ColwiseParallel(input_layouts=rows),
                "4": RowwiseParallel(output_layouts=rows),
            },
        )
    return model


@contextmanager
def costs_of(rank: int) -> Iterator[None]:
    """Have every second operation be dear on one rank, and the others on the next."""
    planned = RecordedValue.planned

    def with_costs(value: RecordedValue) -> Value:
        return replace(planned(value), seconds=1.0 if (rank + value.number) % 2 else 1e-9)

    with patch.object(RecordedValue, "planned", with_costs):
        yield


@contextmanager
def compared_as_on_a_gpu(rank: int) -> Iterator[None]:
    """Have plans be compared, and each rank be faster by another one: together one of them is."""
    machine = replace(CPU, link=1e-7, codec=1e-9, thread_store=1e-9, thread_recompute=1e-6)
    known, decide = StepTimes.record_step, plan_maker.PlanMaker.decide

    def deciding(*given: Any) -> Agreed:
        found = decide(*given)
        IN_TURN.append(len(found.turns))
        return found

    def record_step(self: StepTimes, alternative: Alternative, _: object) -> None:
        slow = 0.3 if rank else 0.1
        known(self, alternative, Took(0.2 if alternative == OFFLOAD_ALONE else slow))

    with (
        patch.object(StepSignature, "is_on_gpu", property(lambda _: True)),
        patch.object(controller, "give_back_unused", lambda _: None),
        patch.object(plan_maker, "machine_of", lambda _: machine),
        patch.object(StepTimes, "wants_full_queue", property(lambda _: False)),
        patch.object(StepTimes, "record_step", record_step),
        patch.object(plan_maker.PlanMaker, "decide", deciding),
    ):
        yield


def share_link(rank: int) -> None:
    """Have the last rank's link be as slow as one that another GPU uses as well."""
    if rank == dist.get_world_size() - 1:
        for name in ("figures", "latest_figures"):
            setattr(Supply, name, lambda *_: TransferFigures(link=3e-7))


def train(
    model: nn.Module, rank: int, case: str, offload: storm.Offload | None = None
) -> tuple[list[Tensor], list[str]]:
    """Return each loss and the last gradients, and a digest of the plan of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + rank)
    found, followed = [], []
    lengths = {"compared": STEPS_TO_COMPARE, "flat": FEW_STEPS, "tensor_parallel": FEW_STEPS}
    steps = lengths.get(case, STEPS)
    for number in range(steps):
        if offload is not None:
            meet(rank, case, number)
            if case == "compared" and number == SHARES:
                share_link(rank)
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
                COMPARED.append(offload.plan.compared if offload.plan else "")
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        if number < steps - 1:
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
    elif case == "again" and number == LEAVES:
        dist.destroy_process_group()
        join_job()
    elif case in ("again", "stages") or (case.startswith("killed") and number < DIES):
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


def compared(case: str, rank: int, address: str) -> dict[str, Any]:
    """Train by a case, without offload and with it."""
    if case == "late" or case.startswith("killed"):
        ranks.LIMITS = LIMITS
    messages = Messages()
    COMPARED.clear()
    IN_TURN.clear()
    plain, _ = train(model_of(case, rank), rank, case)
    costs = compared_as_on_a_gpu if case == "compared" else costs_of
    with (
        nullcontext() if IS_ON_GPU and case != "compared" else costs(rank),
        storm.connect(address, embedded="never", timeout=30.0) as client,
    ):
        model = model_of(case, rank)
        offload = client.offload(model, min_bytes=1024)
        planned, followed = train(model, rank, case, offload)
        return {
            "same": all(map(torch.equal, plain, planned)),
            "followed": followed,
            "compared": offload.plan.compared if offload.plan else "",
            "in_turn": IN_TURN,
            "first_settled": next((one for one in COMPARED if "settled after" in one), ""),
            "settled": ["settled after" in one for one in COMPARED],
            "offloaded_bytes": (stats := offload.stats()).offloaded_bytes,
            "skipped": dict(stats.skipped),
            "skipped_bytes": stats.skipped_bytes,
            "messages": messages.found,
        }


def join_job() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    backend = "nccl" if IS_ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)


def main() -> None:
    rank, address, *cases = int(sys.argv[1]), *sys.argv[4:]
    if IS_ON_GPU:
        torch.cuda.set_device(rank)
    join_job()
    for case in cases:
        print(json.dumps(compared(case, rank, address)), flush=True)
        if case.startswith("killed"):
            os._exit(0)  # there is nobody to say farewell to
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
