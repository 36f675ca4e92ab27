"""What a save that stays costs the thread that trains, by who follows the step.

    PYTHONPATH=tests python -m bench.hook_cost

A chain of small operations, of which each saves two or three tensors: without hooks, with hooks of
Python's that do nothing, with a plan by which all stays that compiled code follows, and with one
that Python follows. Times are those of the thread, in microseconds a save; all four in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_client import native
from storm_client.native import build
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

WARM_UPS = 12
"""Steps in which the plan is learned."""

WIDTH = 64


class Chain(nn.Module):
    """Products with vectors, and their sines: nothing that takes a processor long."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.sin(x * weight)
        return x.sum()


class Nothing(saved_tensors_hooks):
    """Hooks that do nothing, and count how often."""

    saves = 0

    def __init__(self) -> None:
        super().__init__(self._pack, lambda tensor: tensor)

    @staticmethod
    def _pack(tensor: Tensor) -> Tensor:
        Nothing.saves += 1
        return tensor


def step(net: Chain, x: Tensor, context: AbstractContextManager[Any]) -> tuple[float, float]:
    """Compute gradients; return the seconds of both passes, block and all."""
    net.zero_grad()
    began = time.thread_time()
    with context:
        loss = net(x)
    between = time.thread_time()
    loss.backward()
    return between - began, time.thread_time() - between


def measure(client: storm.Client, length: int, steps: int) -> dict[str, Any]:
    """Return microseconds a save above none, forward and backward, of each way."""
    net, x = Chain(length), torch.randn(WIDTH)
    module = native.module
    plans = {name: client.offload(net, min_bytes=64, budget=1.0) for name in ("compiled", "python")}
    seconds: dict[str, list[tuple[float, float]]] = {}
    gc.disable()
    for number in range(WARM_UPS + steps):
        for name in ("none", "nothing", "compiled", "python"):
            native.module = (lambda: None) if name == "python" else module
            context = {"none": nullcontext(), "nothing": Nothing()}.get(name) or plans[name]
            passes = step(net, x, context)
            if number >= WARM_UPS:
                seconds.setdefault(name, []).append(passes)
    native.module = module
    saves = Nothing.saves / (WARM_UPS + steps)
    medians = {
        name: [statistics.median(one) for one in zip(*passes, strict=True)]
        for name, passes in seconds.items()
    }
    more = {
        name: [
            round(1e6 * (one - base) / saves, 2)
            for one, base in zip(both, medians["none"], strict=True)
        ]
        for name, both in medians.items()
    }
    return {"saves": saves, "more_us_a_save": more}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hook_cost")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    build.build()
    with (
        ChildDaemon(flags=["--device=cpu", "--pool-bytes=64MiB"]) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        print(json.dumps(measure(client, options.length, options.steps)))


if __name__ == "__main__":
    main()
