"""Two trainers beside one daemon that serves both their GPUs, and beside a daemon for each GPU.

    stormd run --mps=on -- python tests/bench/front.py --workloads W1 llama-lora llama-small \\
        --json tests/bench/results/front_h100.json

A process a GPU trains one model, with an Offload of the common daemon and one of its own. Both
processes take their turns together: some steps by the one, then some by the other. A figure is the
median step of a process over all turns of a kind. Without GPUs both train on the processor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from recording import parser_of, record
from storm_bench.child_daemon import ChildDaemon
from storm_bench.train.gpt import attention
from storm_bench.train.measure import _step as step
from storm_bench.train.methods import method_of
from storm_bench.train.workloads import WORKLOADS, make

TRAINERS = 2
WARM_UPS = 50
"""Steps by which a plan is learned and followed."""

TURN_SECONDS = 240.0
"""The longest that a trainer waits for the other."""

KINDS = ("one daemon", "a daemon each")


def train(number: int, addresses: dict[str, str], options: argparse.Namespace, shared: Any) -> None:
    """Train as one of the processes, and hand over the milliseconds of a step by kind."""
    barrier, found = shared
    is_on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{number}" if is_on_gpu else "cpu")
    if is_on_gpu:
        torch.cuda.set_device(device)
    method = method_of("storm")
    for workload in options.workloads:
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with ExitStack() as held, attention(device):
            training = make(WORKLOADS[workload], device)
            active = {
                kind: held.enter_context(method.enter(training.module, device, addresses[kind]))
                for kind in KINDS
            }
            for turn in range(options.turns + 1):
                for kind in KINDS if turn % 2 else reversed(KINDS):
                    barrier.wait(TURN_SECONDS)
                    steps = options.steps if turn else options.warm_ups
                    taken = [step(training, active[kind], method)[0] for _ in range(steps)]
                    seconds[kind] += taken[1:] if turn else []
        found.put(
            (workload, number, {kind: 1e3 * statistics.median(s) for kind, s in seconds.items()})
        )
        del training, active
        if is_on_gpu:
            torch.cuda.empty_cache()


def found_by(trainers: list[Any], found: Any) -> Any:
    """Return what one of the processes has found next; end where one of them has failed."""
    while True:
        try:
            return found.get(timeout=1.0)
        except queue.Empty:
            if any(one.exitcode for one in trainers):
                sys.exit("a trainer has failed, as it says above")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each workload and trainer."""
    is_on_gpu = torch.cuda.is_available()
    if is_on_gpu and torch.cuda.device_count() < TRAINERS:
        sys.exit(f"it takes {TRAINERS} GPUs, and here is {torch.cuda.device_count()}")
    flags = [f"--pool-bytes={options.pool_bytes}", f"--device={'cuda' if is_on_gpu else 'cpu'}"]
    context = multiprocessing.get_context("spawn")
    shared = context.Barrier(TRAINERS), context.Queue()
    rows = []
    with ExitStack() as held:

        def serve(*gpus: int) -> str:
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if is_on_gpu else {}
            with patch.dict(os.environ, visible):
                daemon = ChildDaemon(flags=flags, start_seconds=120.0)
                return held.enter_context(daemon).address

        common = serve(*range(TRAINERS))
        trainers = []
        for number in range(TRAINERS):
            addresses = dict(zip(KINDS, (common, serve(number)), strict=True))
            given = (number, addresses, options, shared)
            trainers.append(context.Process(target=train, args=given, daemon=True))
            trainers[-1].start()
        for _ in range(len(options.workloads) * TRAINERS):
            workload, number, ms = found_by(trainers, shared[1])
            one, each = (ms[kind] for kind in KINDS)
            rows.append(
                {
                    "workload": workload,
                    "trainer": number,
                    "one_daemon_ms": round(one, 2),
                    "a_daemon_each_ms": round(each, 2),
                    "ratio": round(one / each, 4),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        for trainer in trainers:
            trainer.join(TURN_SECONDS)
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["W0"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--warm-ups", type=int, default=WARM_UPS, help="steps of each before that")
    parser.add_argument("--pool-bytes", default="32GiB", help="of each daemon (default: 32GiB)")
    options = parser.parse_args()
    record(options.json, {"rows": measure(options)})


if __name__ == "__main__":
    main()
