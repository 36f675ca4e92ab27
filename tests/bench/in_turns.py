"""Times a workload's step without offload, checkpointed and with offload, in turns in one process.

    stormd run --mps=on -- python tests/bench/in_turns.py --workload llama-small --json FILE

Where a step is bound by the host, machines and minutes differ by more than methods do. So each
method has a few steps in turn, several times, on one model; a figure is the median of one turn.
Memory is PyTorch's peak on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import storm_client as storm
import torch
from storm_bench.train.gpt import attention
from storm_bench.train.workloads import WORKLOADS, Training, make
from storm_client.client import Client
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stormd.machine import describe, package_versions

WARM_UPS = 45
"""Steps by which a plan is learned, layers are tried, and what needs no hooks has none."""

Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    made: Tensor = checkpoint(block, x, use_reentrant=False)
    return made


def plainly(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(x)


def step(training: Training, context: AbstractContextManager[object], run: Run) -> float:
    """Return the seconds of one step, optimizer and all."""
    synchronize(training.tokens)
    began = time.perf_counter()
    x = training.net.embed(training.tokens)
    with context:
        for block in training.net.blocks:
            x = run(block, x)
    training.net.loss(x, training.targets).backward()  # type: ignore[no-untyped-call]
    if training.optimizer is not None:
        training.optimizer.step()
    training.module.zero_grad(set_to_none=True)
    synchronize(training.tokens)
    return time.perf_counter() - began


def synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def turn(one: Callable[[], float], steps: int, device: torch.device) -> dict[str, float]:
    """Return the median of some steps, in milliseconds, and their peak in GiB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [one() for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "ms": round(1e3 * statistics.median(seconds), 2),
        "least_ms": round(1e3 * min(seconds), 2),
        "peak_gib": round(peak / (1 << 30), 3),
    }


def measure(options: argparse.Namespace, client: Client) -> list[dict[str, Any]]:
    """Return what each method took in each turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = make(WORKLOADS[options.workload], device)
    methods: dict[str, Callable[[], float]] = {
        "none": lambda: step(training, nullcontext(), plainly),
        "checkpoint": lambda: step(training, nullcontext(), checkpointed),
    }
    for budget in options.budgets:
        offload = client.offload(training.module, budget=budget)
        methods[f"storm {budget}"] = lambda offload=offload: step(training, offload, plainly)
    rows = []
    with attention(device):
        for one in methods.values():
            for _ in range(options.warm_ups):
                one()
        for number in range(options.turns):
            for name, one in methods.items():
                rows.append({"turn": number, "method": name, **turn(one, options.steps, device)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="llama-small")
    parser.add_argument("--budgets", nargs="*", default=["least"], help="of offload")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--warm-ups", type=int, default=WARM_UPS)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with storm.connect(timeout=60.0) as client:
        rows = measure(options, client)
    if options.json:
        command = " ".join(["python tests/bench/in_turns.py", *sys.argv[1:]])
        machine = describe() | {"command": command, "versions": package_versions(("torch",))}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
