"""What the hooks cost in a loop, and where a script has used other memory between two of them.

    PYTHONPATH=tests python -m bench.cold_hooks --json tests/bench/results/cold_hooks.json

Small tensors on the cpu lane, whose bytes cost nothing to copy: what remains is the hooks' own
code. Between two hooks so many MiB are read, as kernels' launches and other Python do in training.
What stays true: hooks are timed where autograd calls them, and the reading is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import storm_client as storm
import torch
from storm_client import hooks
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stormd.child_daemon import ChildDaemon
from stormd.machine import describe, package_versions

MIB = 1 << 20
LINE_BYTES = 64
WARM_UPS = 2


class Between:
    """Hooks of an Offload, each timed after `memory` was read."""

    memory = np.empty(0, np.uint8)
    seconds: dict[str, list[float]]

    def __init__(self) -> None:
        self.seconds = {"pack": [], "unpack": []}

    def timed(self, name: str, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(argument: Any) -> Any:
            self.memory[::LINE_BYTES].sum()
            began = time.perf_counter()
            result = hook(argument)
            self.seconds[name].append(time.perf_counter() - began)
            return result

        return call


class Save(torch.autograd.Function):
    """Saves tensors, and asks for them in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad, *(None for _ in ctx.saved_tensors))


def step(offload: storm.Offload, tensors: int) -> None:
    """Store so many tensors of 4 KiB, give the daemon time, and bring them back."""
    x = torch.zeros(1, requires_grad=True)
    saved = [torch.randn(1024, requires_grad=True) * 1 for _ in range(tensors)]
    with offload:
        y = Save.apply(x, *saved)
    del saved
    offload.stats()  # waits for what is under way
    y.sum().backward()


def measure(offload: storm.Offload, between: Between, mib: int, options: Any) -> dict[str, Any]:
    """Return the medians of both hooks in microseconds, `mib` MiB read before each."""
    between.memory = np.ones(mib * MIB, np.uint8)
    for number in range(WARM_UPS + options.steps):
        if number == WARM_UPS:
            for found in between.seconds.values():
                found.clear()
        step(offload, options.tensors)
    medians = {
        f"{name}_us": round(1e6 * statistics.median(found), 1)
        for name, found in between.seconds.items()
    }
    return {"mib_between": mib} | medians


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cold_hooks")
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 1, 4, 16, 64])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    between = Between()
    hooks.saved_tensors_hooks = lambda pack, unpack: saved_tensors_hooks(
        between.timed("pack", pack), between.timed("unpack", unpack)
    )
    flags = ["--device=cpu", "--pool-bytes=256MiB"]
    with (
        ChildDaemon(flags=flags) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        offload = client.offload(min_bytes=1, codec="raw")
        figures = [measure(offload, between, mib, options) for mib in options.mib]
    command = " ".join(["python -m bench.cold_hooks", *sys.argv[1:]])
    versions = package_versions(("torch", "numpy", "pyzmq"))
    result = {"machine": describe() | {"command": command, "versions": versions}}
    for one in figures:
        print(one)
    if options.json:
        options.json.write_text(json.dumps(result | {"figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
