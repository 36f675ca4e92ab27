"""Times a workload's step without offload, checkpointed and with offload, in turns in one process.

    stormd run --mps=on -- python tests/bench/in_turns.py --workload llama-small --json FILE
    stormd run --mps=on -- python tests/bench/in_turns.py --model bert --json FILE

Where a step is bound by the host, machines and minutes differ by more than methods do. So each
method has a few steps in turn, several times; a figure is the median of one turn. A workload is
one model for all of them. A model of the zoo, or of `other_models.py`, is built for each. Thread
time is the training thread's own, and switches are how often in a step another thread took its
core. Memory is PyTorch's peak on a GPU, and the most that PyTorch held there for it, used or not: a
turn begins with a step that does not count, after all unused memory of the turn before was given
back.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import storm_client as storm
import torch
from other_models import OTHERS
from recording import parser_of, record
from storm_bench.devices import device_here
from storm_bench.train import BUDGET_PREFIX
from storm_bench.train.gpt import attention
from storm_bench.train.measure import _step as step
from storm_bench.train.methods import METHODS, method_of
from storm_bench.train.workloads import WORKLOADS, make
from storm_bench.zoo import MODELS
from storm_bench.zoo import models as zoo_models
from storm_bench.zoo.models import Size
from storm_bench.zoo.row import Training, Trial

GIB = 1 << 30

WARM_UPS = 45
"""Steps by which a plan is learned and followed."""

PLAIN_WARM_UPS = 6
"""Those where there is no plan."""


def turn(one: Callable[[], float], steps: int, device: torch.device) -> dict[str, float]:
    """Return the median of some steps, in milliseconds, and their most memory in GiB."""
    is_on_gpu = device.type == "cuda"
    if is_on_gpu:
        torch.cuda.empty_cache()
        one()
        torch.cuda.reset_peak_memory_stats(device)
    thread, switches = time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    seconds = [one() for _ in range(steps)]
    thread = time.thread_time() - thread
    switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - switches
    peak = torch.cuda.max_memory_allocated(device) if is_on_gpu else 0
    reserved = torch.cuda.max_memory_reserved(device) if is_on_gpu else 0
    return {
        "ms": round(1e3 * statistics.median(seconds), 2),
        "least_ms": round(1e3 * min(seconds), 2),
        "thread_ms": round(1e3 * thread / steps, 2),
        "switches": round(switches / steps, 1),
        "peak_gib": round(peak / GIB, 3),
        "reserved_gib": round(reserved / GIB, 3),
    }


def measure_model(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each method took in each turn, with a model of the zoo or another one."""
    zoo_models.WORKLOADS.update(OTHERS)
    device = torch.device(device_here())
    size = Size(device, is_small=device.type == "cpu")
    budgets = {BUDGET_PREFIX + budget: budget for budget in options.budgets}
    trainings: dict[str, Training] = {}
    for name in (*options.methods, *budgets):
        method = "storm" if name in budgets else name
        trial = Trial(options.model, method, budgets.get(name), size, options.warm_ups, 0)
        training = trainings[name] = Training(trial)
        for number in range(options.warm_ups if method == "storm" else PLAIN_WARM_UPS):
            training.step(number)
    numbers = count(options.warm_ups)
    ones = {name: partial(_seconds, one, numbers) for name, one in trainings.items()}
    rows = in_turns(ones, options, device)
    offloads = {name: one.context for name, one in trainings.items()}
    plans = {
        name: str(one.plan).splitlines()
        for name, one in offloads.items()
        if isinstance(one, storm.Offload)
    }
    return [*rows, *plans_shown(plans)]


def _seconds(training: Training, numbers: Iterator[int]) -> float:
    return training.step(next(numbers))[0]


def in_turns(
    ones: dict[str, Callable[[], float]], options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Return what each step's method took in each turn."""
    rows = []
    for number in range(options.turns):
        for name, one in ones.items():
            rows.append({"turn": number, "method": name, **turn(one, options.steps, device)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def measure(options: argparse.Namespace, address: str) -> list[dict[str, Any]]:
    """Return what each method took in each turn, with a workload, beside the daemon there."""
    device = torch.device(device_here())
    training = make(WORKLOADS[options.workload], device)
    names = [*options.methods, *(BUDGET_PREFIX + budget for budget in options.budgets)]
    with ExitStack() as held, attention(device):
        ones: dict[str, Callable[[], float]] = {}
        plans: dict[str, Callable[[], dict[str, Any]]] = {}
        for name in names:
            method = method_of(name)
            active = held.enter_context(method.enter(training.module, device, address))
            ones[name] = lambda active=active, method=method: step(training, active, method)[0]
            plans[name] = active.figures
            for _ in range(options.warm_ups if name.startswith("storm") else PLAIN_WARM_UPS):
                ones[name]()
        rows = in_turns(ones, options, device)
        found = {name: figures().get("plan", []) for name, figures in plans.items()}
        return [*rows, *plans_shown(found)]


def plans_shown(plans: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Print the plans by method, and return their rows; methods without one have none."""
    rows = [{"method": name, "plan": plan} for name, plan in plans.items() if plan]
    for row in rows:
        print(row["method"], *row["plan"], sep="\n", flush=True)
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--workload", choices=WORKLOADS, default="llama-small")
    which.add_argument(
        "--model", choices=[*MODELS, *OTHERS], help="of `stormd bench zoo`, or of `other_models.py`"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["none", "checkpoint", "storm"]
    )
    parser.add_argument("--budgets", nargs="*", default=[], help="of offload, besides")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--warm-ups", type=int, default=WARM_UPS, help="steps of each before that")
    options = parser.parse_args()
    with storm.connect(timeout=60.0) as client:
        rows = measure_model(options) if options.model else measure(options, client.address)
    record(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
