"""What the hooks cost in a loop, and where a script has used other memory between two of them.

    PYTHONPATH=tests python -m bench.cold_hooks --json tests/bench/results/cold_hooks.json

Small tensors on the cpu lane, whose bytes cost nothing to copy: what remains is the hooks' own
code. Between two hooks so many MiB are read, as kernels' launches and other Python do in training.
What stays true: hooks are timed where autograd calls them, and the reading is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import storm_client as storm
import torch
from bench.lane_cost import MIB, WARM_UPS, TimedHooks, spread, timed_wait
from storm_bench.child_daemon import ChildDaemon
from storm_client.transport.connection import Connection
from torch import Tensor

from stormd.machine import describe, package_versions

LINE_BYTES = 64


class ColdHooks(TimedHooks):
    """The same after `memory` was read."""

    memory = np.empty(0, np.uint8)

    def _timed(self, name: str, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        timed = super()._timed(name, hook)

        def cold(argument: Any) -> Any:
            self.memory[::LINE_BYTES].sum()
            return timed(argument)

        return cold


class Save(torch.autograd.Function):
    """Saves tensors, and asks for them in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad, *(None for _ in ctx.saved_tensors))


def step(offload: storm.Offload, tensors: int) -> float:
    """Store so many tensors of 4 KiB, give the daemon time, and bring them back.

    Returns the seconds a tensor that leaving the block takes, where they are sent.
    """
    x = torch.zeros(1, requires_grad=True)
    saved = [torch.randn(1024, requires_grad=True) * 1 for _ in range(tensors)]
    with offload:
        y = Save.apply(x, *saved)
        del saved
        began = time.perf_counter()
    left = (time.perf_counter() - began) / tensors
    offload.stats()  # waits for what is in flight
    y.sum().backward()
    return left


def measure(offload: storm.Offload, mib: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what both hooks take, without waiting for the daemon, `mib` MiB read before each."""
    ColdHooks.memory = np.ones(mib * MIB, np.uint8)
    left = []
    for number in range(WARM_UPS + options.steps):
        if number == WARM_UPS:
            for found in ColdHooks.seconds.values():
                found.clear()
        left.append(step(offload, options.tensors))
    taken = {"leave_us": spread(left[WARM_UPS:])} | {
        f"{name}_us": spread(ColdHooks.seconds[name]) for name in ("pack", "unpack")
    }
    return {"mib_between": mib} | taken


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cold_hooks")
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 1, 4, 16, 64])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ColdHooks.install()
    Connection.wait = timed_wait
    ColdHooks.seconds = {name: [] for name in ("pack", "pack_wait", "unpack", "unpack_wait")}
    flags = ["--device=cpu", "--pool-bytes=256MiB"]
    with (
        ChildDaemon(flags=flags) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        offload = client.offload(min_bytes=1, codec="raw")
        figures = [measure(offload, mib, options) for mib in options.mib]
    command = " ".join(["python -m bench.cold_hooks", *sys.argv[1:]])
    versions = package_versions(("torch", "numpy", "pyzmq"))
    result = {"machine": describe() | {"command": command, "versions": versions}}
    for one in figures:
        print(one)
    if options.json:
        options.json.write_text(json.dumps(result | {"figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
