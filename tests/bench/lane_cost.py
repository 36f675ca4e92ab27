"""What offloading costs the host: seconds of a hook, and of the daemon's processors an operation.

    python tests/bench/lane_cost.py --json tests/bench/results/lane_cost_h200.json

A chain of operations saves a tensor each, in a process of its own beside a daemon. Between two of
them the host launches other, tiny, kernels for a while, as a training script does, so that the
daemon keeps up: what is measured is the work, not the waiting for a link that is too slow for it.
The staging area, which also bounds what the client holds back, is a quarter of a step, so that
most tensors come from the daemon. What stays true: hooks are timed where autograd calls them, and
the daemon's time is what the kernel charged to it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import storm_client as storm
import torch
from storm_client import hooks
from storm_kernels.ancf import DType
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stormd.child_daemon import ChildDaemon
from stormd.machine import describe, package_versions

MIB = 1 << 20
WARM_UPS = 3


class Case(NamedTuple):
    """Tensors of a step, all of `nbytes`; `work` in seconds of the host after each, both ways."""

    nbytes: int
    codec: str
    tensors: int
    steps: int
    work: float


CASES = (
    Case(MIB, "ancf", 64, 30, 4e-4),
    Case(MIB, "raw", 64, 30, 4e-4),
    Case(32 * MIB, "ancf", 16, 12, 2e-3),
    Case(32 * MIB, "raw", 16, 12, 2e-3),
)


class OtherWork(torch.autograd.Function):
    """Hands a tensor on after other work of the host, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        launch_for(seconds, x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        launch_for(ctx.seconds, grad.device)
        return grad, None


def launch_for(seconds: float, device: torch.device) -> None:
    """Launch tiny kernels for that long."""
    tiny = torch.zeros(16, device=device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        tiny.add_(1)


class TimedHooks(saved_tensors_hooks):
    """The hooks of an Offload with a clock around them."""

    seconds: dict[str, list[float]]

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__(self._timed("pack", pack), self._timed("unpack", unpack))

    def _timed(self, name: str, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        seconds = self.seconds[name]

        def timed(argument: Any) -> Any:
            began = time.perf_counter()
            result = hook(argument)
            seconds.append(time.perf_counter() - began)
            return result

        return timed


class Meter:
    """The processor time of a daemon and of this process, and the daemon's operations so far."""

    def __init__(self, daemon: ChildDaemon) -> None:
        self._process = psutil.Process(daemon.pid)
        self._status = daemon.status
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        flows = self._status()["throughput"]
        theirs, ours = self._process.cpu_times(), resource.getrusage(resource.RUSAGE_SELF)
        threads = {f"thread {one.id}": one.user_time + one.system_time for one in self._threads()}
        return threads | {
            "daemon": theirs.user + theirs.system,
            "client": ours.ru_utime + ours.ru_stime,
            "store": flows["store"]["operations"],
            "restore": flows["restore"]["operations"],
        }

    def _threads(self) -> list[Any]:
        return self._process.threads()

    def since(self) -> dict[str, Any]:
        """Return the operations since the start, and the time of each process for one of them."""
        now = self._read()
        spent = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        operations = max(1.0, spent["store"] + spent["restore"])
        by_thread = sorted(spent[name] for name in spent if name.startswith("thread"))[::-1]
        return {
            "stores": int(spent["store"]),
            "restores": int(spent["restore"]),
            "daemon_us": round(1e6 * spent["daemon"] / operations, 1),
            "daemon_threads_us": [round(1e6 * one / operations, 1) for one in by_thread if one][:8],
            "client_us": round(1e6 * spent["client"] / operations, 1),
        }


def step(x: Tensor, case: Case, offload: hooks.Offload) -> None:
    """Save `case.tensors` tensors, and use them again."""
    with offload:
        for _ in range(case.tensors):
            x = OtherWork.apply(x.sin(), case.work)
    x.sum().backward()


def measure(case: Case, daemon: ChildDaemon, device: torch.device) -> dict[str, Any]:
    """Return the figures of one case."""
    torch.manual_seed(0)
    x = torch.randn(case.nbytes // 2, dtype=torch.bfloat16, device=device).requires_grad_()
    with storm.connect(daemon.address, embedded="never", timeout=30.0) as client:
        offload = client.offload(None, min_bytes=64 << 10, codec=case.codec)
        TimedHooks.seconds = {"pack": [], "unpack": []}
        for _ in range(WARM_UPS):
            step(x, case, offload)
        before, meter = offload.stats(), Meter(daemon)
        for seconds in TimedHooks.seconds.values():
            seconds.clear()
        for _ in range(case.steps):
            step(x, case, offload)
        after = offload.stats()
        figures = meter.since()
    return {
        "case": case._asdict(),
        **{f"{name}_us": spread(seconds) for name, seconds in TimedHooks.seconds.items()},
        **figures,
        "kept": dict(after.kept),
        "ratio": round(after.ratio, 3),
        "restore_wait_us": _us_each(after.restore_wait_seconds - before.restore_wait_seconds, case),
        "store_us": _us_each(after.store_seconds - before.store_seconds, case),
    }


def _us_each(seconds: float, case: Case) -> float:
    return round(1e6 * seconds / (case.steps * case.tensors), 1)


def spread(seconds: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and mean in microseconds, and of how many calls."""
    ordered = sorted(1e6 * one for one in seconds)
    return {
        "median": round(statistics.median(ordered), 1),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
        "mean": round(statistics.fmean(ordered), 1),
        "calls": len(ordered),
    }


def compile_codec() -> float:
    """Have the kernels in the cache on disk, and return how many seconds that took."""
    from storm_kernels.ancf.cuda import CudaCodec

    began = time.perf_counter()
    CudaCodec().prepare(DType.BFLOAT16)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--pool", default="4GiB", help="the daemon's pool")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hooks.saved_tensors_hooks = TimedHooks
    found: dict[str, Any] = {"machine": machine(device), "cases": []}
    if device.type == "cuda":
        found["compile_seconds"] = round(compile_codec(), 2)
    for case in CASES:
        staging = case.nbytes * case.tensors // 4
        flags = ["--device", device.type, "--pool-bytes", options.pool]
        flags += [f"--staging-bytes-{device.type}", str(staging)]
        flags += [f"--part-bytes-{device.type}", str(min(32 * MIB, staging // 2))]
        with ChildDaemon(flags=flags) as daemon:
            found["cases"].append(measure(case, daemon, device))
        print(json.dumps(found["cases"][-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the figures were measured on."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    versions = package_versions(("torch", "cupy-cuda13x", "cuda-bindings", "pyzmq", "uvloop"))
    return describe() | {"command": " ".join(sys.argv), "gpu": name, "versions": versions}


if __name__ == "__main__":
    main()
