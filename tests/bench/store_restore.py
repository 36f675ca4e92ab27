"""What a store and a restore cost the thread that trains, and the daemon's loop.

    PYTHONPATH=tests python -m bench.store_restore --json FILE

One step saves tensors of one size and uses them again. Hooks are timed where autograd calls them,
by the processor time of the thread: what it waits is not counted, what it does for the daemon's
answers meanwhile is. Between two hooks so many MiB are read, as kernels' launches and other Python
do in training, which is not counted. Lanes: `cpu`, `cpu without its copy`, and `in place`, which
stands for a device: the daemon has all memory mapped, nothing is copied, streams wait by
themselves, and no driver is called.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import storm_client as storm
import torch
from bench.lane_cost import thread_seconds
from storm_bench.child_daemon import ChildDaemon
from storm_client import hook_stack
from storm_client.lanes import Mapped, Request, Slot
from storm_client.lanes.cpu import CpuLane
from storm_client.lanes.segments import Segments
from storm_client.planner import in_flight
from storm_client.transport import memory_pressure, sessions
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stormd.machine import describe, package_versions
from stormd.protocol import MapSegment, Welcome

KIB, MIB = 1 << 10, 1 << 20
WARM_UPS = 4
LINE_BYTES = 64
HELD = 4
"""Tensors that the lane in place holds back; all others come from the daemon."""


class CopylessLane(CpuLane):
    """The cpu lane, but nothing is copied: what is restored has any bytes."""

    def stage(self, source: torch.UntypedStorage, begin: int, slot: Slot) -> None:
        """Do nothing."""

    def unstage(self, slot: Slot, destination: torch.UntypedStorage, begin: int) -> None:
        """Do nothing."""


class StandIn(CpuLane):
    """Says that the daemon works on all memory where it lies; what is restored has any bytes."""

    in_place: InPlace | None = None
    budget_bytes = 1 << 30

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        super().attach(welcome, descriptors, request)
        self.in_place = InPlace()


class InPlace:
    """Answers at once, as a device's driver never would."""

    waits_on_device = True

    def __init__(self) -> None:
        self.segments = Segments(None)  # type: ignore[arg-type]  # it is asked nothing
        self._numbers = count(1)

    def is_read(self, sequence: int) -> bool:
        return True

    def overtake(self, sequence: int, source: torch.UntypedStorage) -> None:
        raise AssertionError("all is read")

    def find(self, address: int, nbytes: int) -> Mapped | None:
        return Mapped(0, 0)

    def offers(self) -> list[MapSegment]:
        return []

    def sweep(self) -> bool:
        return False

    def produced(self, count: int) -> range:
        first = next(self._numbers)
        for _ in range(count - 1):
            next(self._numbers)
        return range(first, first + count)

    def await_restored(self, tickets: Sequence[int]) -> None:
        """Do nothing."""

    def release(self, ticket: int) -> None:
        """Do nothing."""

    def headroom(self) -> int:
        return 1 << 30


LANES: dict[str, type[CpuLane]] = {
    "cpu": CpuLane,
    "cpu without its copy": CopylessLane,
    "in place": StandIn,
}


class TimedHooks(saved_tensors_hooks):
    """The hooks of an Offload with a clock around them."""

    memory = np.empty(0, np.uint8)
    """Read before each."""
    seconds: ClassVar[dict[str, list[float]]] = {"pack": [], "unpack": []}

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__(self._timed("pack", pack), self._timed("unpack", unpack))

    @classmethod
    def install(cls) -> None:
        """Have blocks put these on PyTorch's stack, around what they would put there."""
        push = hook_stack._push_hooks

        def push_timed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
            timed = cls(pack, unpack)
            push(timed.pack_hook, timed.unpack_hook)

        hook_stack._push_hooks = push_timed

    def _timed(self, name: str, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        found = self.seconds[name]

        def timed(argument: Any) -> Any:
            if self.memory.nbytes:
                self.memory[::LINE_BYTES].sum()
            began = time.thread_time_ns()
            result = hook(argument)
            found.append(time.thread_time_ns() - began)
            return result

        return timed


class Save(torch.autograd.Function):
    """Makes a tensor, and saves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018 - it is brought back
        return grad, None


def step(offload: storm.Offload, like: Tensor, tensors: int) -> float:
    """Store so many tensors, bring them back; return the seconds a tensor of leaving the block."""
    x = torch.zeros(1, requires_grad=True)
    with offload:
        for _ in range(tensors):
            x = Save.apply(x, torch.empty_like(like).requires_grad_() * 1)
        began = time.thread_time()
    left = (time.thread_time() - began) / tensors
    offload.stats()  # waits for what is in flight
    x.sum().backward()
    return left


def measure(
    client: storm.Client, daemon: ChildDaemon, nbytes: int, mib: int, options: Any
) -> dict[str, Any]:
    """Return what both hooks take, `mib` MiB read before each, and what the daemon takes."""
    TimedHooks.memory = np.ones(mib * MIB, np.uint8)
    found = TimedHooks.seconds
    offload = client.offload(min_bytes=1, codec="raw", budget=0.0, replay=False)
    like = torch.zeros(nbytes // 4)
    left: list[float] = []
    gc.collect()
    gc.disable()  # whose rare long looks at all objects would hide the rest
    for number in range(WARM_UPS + options.steps):
        if number == WARM_UPS:
            for seconds in found.values():
                seconds.clear()
            before, began = thread_seconds(daemon.pid), time.perf_counter()
            earlier = _operations(daemon)
        left.append(step(offload, like, options.tensors))
    ended = time.perf_counter()
    gc.enable()
    offload.stats()
    after = thread_seconds(daemon.pid)
    operations = _operations(daemon) - earlier
    clock = _clock_ns()
    taken = {f"{name}_us": spread(seconds, clock) for name, seconds in found.items()}
    threads = {
        name: round(1e6 * (one - before.get(name, 0.0)) / max(1, operations), 1)
        for name, one in after.items()
    }
    return {
        "nbytes": nbytes,
        "mib_between": mib,
        **taken,
        "leave_us": round(1e6 * statistics.median(left[WARM_UPS:]), 1),
        "operations": operations,
        "operations_a_second": round(operations / (ended - began)),
        "daemon_us": {name: one for name, one in threads.items() if one},
    }


def _operations(daemon: ChildDaemon) -> int:
    flows = daemon.status()["throughput"]
    return int(flows["store"]["operations"] + flows["restore"]["operations"])


def _clock_ns() -> float:
    """Return what the clock itself takes."""
    found = []
    for _ in range(2000):
        began = time.thread_time_ns()
        found.append(time.thread_time_ns() - began)
    return statistics.median(found)


def spread(found: list[float], clock: float) -> dict[str, float]:
    """Return median, 99th percentile and mean in microseconds, and of how many calls."""
    ordered = sorted(1e-3 * (one - clock) for one in found)
    return {
        "median": round(statistics.median(ordered), 1),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
        "mean": round(statistics.fmean(ordered), 1),
        "calls": len(ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.store_restore")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 8], help="read between hooks")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    TimedHooks.install()
    memory_pressure._observe = lambda: None  # PyTorch's allocator, which no stand-in has
    figures = []
    for lane in options.lanes:
        sessions.CpuLane = LANES[lane]
        for kib in options.kib:
            for mib in options.mib:
                staging = str(max(64, options.tensors * kib // 2 >> 10) * MIB)
                in_flight.START_BYTES = in_flight.LEAST_BYTES = HELD * kib * KIB
                flags = ["--device=cpu", "--pool-bytes=1GiB", f"--staging-bytes-cpu={staging}"]
                with (
                    ChildDaemon(flags=flags) as daemon,
                    storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
                ):
                    one = measure(client, daemon, kib * KIB, mib, options)
                figures.append({"lane": lane, **one})
                print(json.dumps(figures[-1]), flush=True)
    if options.json:
        command = " ".join(["python -m bench.store_restore", *sys.argv[1:]])
        versions = package_versions(("torch", "numpy", "pyzmq"))
        machine = describe() | {"command": command, "versions": versions}
        result = {"machine": machine, "figures": figures}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
