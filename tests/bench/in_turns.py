"""Times a workload's step without offload, checkpointed and with offload, in turns in one process.

    stormd run --mps=on -- python tests/bench/in_turns.py --workload llama-small --json FILE

Where a step is bound by the host, machines and minutes differ by more than methods do. So each
method has a few steps in turn, several times, on one model; a figure is the median of one turn.
Memory is PyTorch's peak on a GPU, and the most that PyTorch held there for it, used or not: a turn
begins with a step that does not count, after all unused memory of the turn before was given back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import storm_client as storm
import torch
from storm_bench.train import BUDGET_PREFIX
from storm_bench.train.gpt import attention
from storm_bench.train.measure import _step as step
from storm_bench.train.methods import METHODS, method_of
from storm_bench.train.workloads import WORKLOADS, make

from stormd.machine import describe, package_versions

GIB = 1 << 30

WARM_UPS = 45
"""Steps by which a plan is learned and followed."""


def turn(one: Callable[[], float], steps: int, device: torch.device) -> dict[str, float]:
    """Return the median of some steps, in milliseconds, and their most memory in GiB."""
    is_on_gpu = device.type == "cuda"
    if is_on_gpu:
        torch.cuda.empty_cache()
        one()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [one() for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated(device) if is_on_gpu else 0
    reserved = torch.cuda.max_memory_reserved(device) if is_on_gpu else 0
    return {
        "ms": round(1e3 * statistics.median(seconds), 2),
        "least_ms": round(1e3 * min(seconds), 2),
        "peak_gib": round(peak / GIB, 3),
        "reserved_gib": round(reserved / GIB, 3),
    }


def measure(options: argparse.Namespace, address: str) -> list[dict[str, Any]]:
    """Return what each method took in each turn, beside the daemon at an address."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = make(WORKLOADS[options.workload], device)
    names = [*options.methods, *(BUDGET_PREFIX + budget for budget in options.budgets)]
    rows = []
    with ExitStack() as held, attention(device):
        ones: dict[str, Callable[[], float]] = {}
        plans: dict[str, Callable[[], dict[str, Any]]] = {}
        for name in names:
            method = method_of(name)
            active = held.enter_context(method.enter(training.module, device, address))
            ones[name] = lambda active=active, method=method: step(training, active, method)[0]
            plans[name] = active.figures
            for _ in range(options.warm_ups):
                ones[name]()
        for number in range(options.turns):
            for name, one in ones.items():
                rows.append({"turn": number, "method": name, **turn(one, options.steps, device)})
                print(json.dumps(rows[-1]), flush=True)
        for name, figures in plans.items():
            if plan := figures().get("plan"):
                rows.append({"method": name, "plan": plan})
                print(name, *plan, sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="llama-small")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["none", "checkpoint", "storm"]
    )
    parser.add_argument("--budgets", nargs="*", default=[], help="of offload, besides")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--warm-ups", type=int, default=WARM_UPS, help="steps of each before that")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with storm.connect(timeout=60.0) as client:
        rows = measure(options, client.address)
    if options.json:
        command = " ".join(["python tests/bench/in_turns.py", *sys.argv[1:]])
        machine = describe() | {"command": command, "versions": package_versions(("torch",))}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
