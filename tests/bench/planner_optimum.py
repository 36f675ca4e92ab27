"""How far the planner's choice is from the best one, on steps that were recorded.

    PYTHONPATH=tests python -m bench.planner_optimum --json tests/bench/results/planner_optimum.json

Each workload of the training benchmark is run a sixteenth as wide and as long on the cpu lane, and
its step's values are then taken as those of the workload itself: 256 times the bytes, and the time
that a GPU's arithmetic or memory needs for each operation. scipy's MILP solver (HiGHS) finds the
cheapest choice by the planner's own costs; both are compared for six budgets and links of 55, 25
and 12 GB/s. What is timed is the choosing alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import storm_client as storm
from bench.recording import parser_of, record
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array
from storm_bench.child_daemon import ChildDaemon
from storm_bench.train.gpt import Workload
from storm_bench.train.llama import LlamaWorkload
from storm_bench.train.workloads import WORKLOADS, make, plain_loss
from storm_client.planner.decisions import Keep, Replay
from storm_client.planner.groups import MAX_IN_BLOCK
from storm_client.planner.machine import CUDA, Machine
from storm_client.planner.prices import operation_seconds
from storm_client.planner.problem import Problem, Value
from storm_client.planner.solver import Choice, choose
from torch import device as torch_device
from torch.nn.attention import SDPBackend, sdpa_kernel

SCALE = 16
RATIO = 1.42
"""Of bfloat16 activations, as measured on a GPU."""

ARITHMETIC = 672e12
"""Floating-point operations a second of a product in bfloat16, one H200."""

ATTENTION = 400e12
MEMORY = 4.1e12
"""Bytes a second that an elementwise kernel moves."""

ROOMS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6)
"""Of what a step saves."""

LINKS = (55, 25, 12)
"""GB a second."""

STEP = 3.0
"""Times what the operations of a forward pass take together: a step without offload."""

CPU = torch_device("cpu")


def main() -> None:
    """Compare as the arguments say."""
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS)[1:])
    parser.add_argument("--seconds", type=float, default=60.0, help="for the solver, each time")
    args = parser.parse_args()
    rows = []
    with ChildDaemon(flags=["--pool-bytes=1GiB", "--device=cpu"]) as daemon:
        for name in args.workloads:
            problem = recorded(name, daemon.address)
            saved = sum(value.nbytes for value in problem.saved)
            for link, room in product(LINKS, ROOMS):
                row = compared(problem, int(room * saved), 1e-9 / link, args.seconds)
                rows.append({"workload": name, "link": link, "room": room, **row})
                print(json.dumps(rows[-1]))
    worst = max(row["ratio"] for row in rows)
    print(f"worst: {worst:.4f} of the optimum")
    record(args.json, {"worst": worst, "rows": rows})


def recorded(name: str, address: str) -> Problem:
    """Return a workload's step, with the times that a GPU needs for its values."""
    work = WORKLOADS[name]
    training = make(_small(work), CPU)
    flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION)  # saves what it does on a GPU
    with storm.connect(address, embedded="never", timeout=30.0) as client, flash:
        offload = client.offload(training.module, min_bytes=(1 << 20) // SCALE**2)
        x = training.net.embed(training.tokens)
        with offload:
            for block in training.net.blocks:
                x = block(x)
        plain_loss(training.net, x, training.targets).backward()  # type: ignore[no-untyped-call]
        signature = offload._planning._signatures.latest
        values = [value.planned() for value in signature.values]
        timed = tuple(
            replace(value, nbytes=value.nbytes * SCALE**2, seconds=_gpu_seconds(value, values))
            for value in values
        )
        forward = sum(value.seconds for value in timed)
        return Problem(timed, forward_seconds=forward, block_ends=signature.block_ends)


def _small(work: Workload | LlamaWorkload) -> Workload | LlamaWorkload:
    sizes = {"width": work.width // SCALE, "length": max(work.length // SCALE, 1)}
    if isinstance(work, Workload):
        return replace(work, **sizes, vocabulary=1000, head=work.head // SCALE)
    return replace(work, **sizes, vocabulary=1000, hidden=work.hidden // SCALE)


def _gpu_seconds(value: Value, values: Sequence[Value]) -> float:
    nbytes = value.nbytes * SCALE**2
    if value.operation == "scaled_dot_product_attention":
        return nbytes / 2 * 4 * (value.shape[-2] * SCALE / 2) / ATTENTION
    if value.is_expensive:
        inner = next((values[n].shape[-1] for n in value.inputs if n >= 0), value.shape[-1])
        return nbytes / 2 * 2 * inner * SCALE / ARITHMETIC
    return 3 * nbytes / MEMORY if value.operation else 0.0


def compared(problem: Problem, room: int, link: float, solver_seconds: float) -> dict[str, Any]:
    """Return what the choice of the planner and the best one cost, and what finding them took.

    `link` is the seconds of a byte on the link, one way.
    """
    values, window = problem.values, problem.forward_seconds or 0.0
    machine = replace(CUDA, link=link).compressing(RATIO)
    begin = time.perf_counter()
    choice = choose(problem, machine, budget_bytes=room)
    chosen = time.perf_counter() - begin
    found = cost_of(choice, values, machine, window)
    ends = problem.block_ends
    fixed = [replace(value, operation="") if value.number in ends else value for value in values]
    begin = time.perf_counter()
    best, gap = optimum(fixed, machine, room, window, solver_seconds)
    return {
        "values": len(values),
        "chosen_ms": found * 1e3,
        "optimum_ms": best * 1e3,
        "optimum_gap": gap,
        "step_ms": (window * STEP + found) * 1e3,
        "ratio": (window * STEP + found) / (window * STEP + best),
        "choosing_takes_ms": chosen * 1e3,
        "optimum_takes_ms": (time.perf_counter() - begin) * 1e3,
    }


def cost_of(choice: Choice, values: Sequence[Value], machine: Machine, window: float) -> float:
    """Return the seconds that a choice adds to a step."""
    seconds = operation_seconds(values, machine)
    replays = [n for n, one in enumerate(choice.decisions) if isinstance(one, Replay)]
    shipped = [
        value.nbytes
        for value, decision, reason in zip(values, choice.decisions, choice.reasons, strict=True)
        if not isinstance(decision, Keep | Replay) and reason != "not saved"
    ]
    return (
        sum(max(seconds[n], machine.thread_recompute) for n in replays)
        + sum(nbytes * machine.codec + machine.thread_store for nbytes in shipped)
        + max(0.0, sum(shipped) * machine.link - window)
    )


def optimum(
    values: Sequence[Value], machine: Machine, room: int, window: float, seconds: float
) -> tuple[float, float]:
    """Return a bound of the least that a choice can add to a step, and the solver's relative gap.

    Three variables a value say whether it is kept, shipped, recomputed, and a fourth how deep its
    making goes; one is the link's time that nothing hides. A saved value needs one of the three,
    and what is recomputed needs one of them for each input.
    """
    count = len(values)
    takes = operation_seconds(values, machine)
    kept, shipped, made, depth, exposed = (n * count for n in range(5))
    objective, upper = np.zeros(exposed + 1), np.ones(exposed + 1)
    for value in values:
        n = value.number
        objective[shipped + n] = value.nbytes * machine.codec + machine.thread_store
        objective[made + n] = max(takes[n], machine.thread_recompute)
        upper[depth + n] = MAX_IN_BLOCK
        if not value.operation or math.isinf(takes[n]):
            upper[made + n], objective[made + n] = 0.0, 0.0
    objective[exposed], upper[exposed] = 1.0, np.inf
    rows, least = lil_array((len(values) * 8, exposed + 1)), []

    def need(row: dict[int, float], bound: float) -> None:
        for index, factor in row.items():
            rows[len(least), index] = factor
        least.append(bound)

    for value in values:
        n = value.number
        if value.is_saved:
            need({kept + n: 1.0, shipped + n: 1.0, made + n: 1.0}, 1.0)
        for source in {s for s in value.inputs if s >= 0}:
            had = {kept + source: 1.0, shipped + source: 1.0, made + source: 1.0}
            need({**had, made + n: -1.0}, 0.0)
            deeper = {depth + n: 1.0, depth + source: -1.0}
            both = {made + n: -MAX_IN_BLOCK, made + source: -MAX_IN_BLOCK}
            need({**deeper, **both}, 1.0 - 2 * MAX_IN_BLOCK)
    need({kept + v.number: -float(v.nbytes) / 1e6 for v in values}, -room / 1e6)
    need({exposed: 1.0} | {shipped + v.number: -v.nbytes * machine.link for v in values}, -window)
    result = milp(
        objective * 1e3,
        constraints=LinearConstraint(rows.tocsr()[: len(least)], np.array(least), np.inf),
        bounds=Bounds(np.zeros(exposed + 1), upper),
        integrality=np.array([1] * 3 * count + [0] * (count + 1)),
        options={"time_limit": seconds, "mip_rel_gap": 1e-3},
    )
    assert result.mip_dual_bound is not None, result.message
    return float(result.mip_dual_bound) / 1e3, float(result.mip_gap)


if __name__ == "__main__":
    main()
