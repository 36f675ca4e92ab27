"""What offloading costs the host: seconds of a hook, and of the daemon's processors an operation.

    python tests/bench/lane_cost.py --json tests/bench/results/lane_cost_h200.json

A chain of operations saves a tensor each, in a process of its own beside a daemon. Between two of
them the host launches other, tiny, kernels for a while, as a training script does, so that the
daemon keeps up. How much the client holds back decides what is measured: in the held cases all
tensors stay until they are used, so nothing is restored; in the others nearly all of them come
from the daemon. What stays true: hooks are timed where autograd calls them, what they wait for
the daemon is counted apart from their work, and the daemon's time is what the kernel charged to it.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import storm_client as storm
import torch
from recording import parser_of, record
from storm_bench.child_daemon import ChildDaemon
from storm_client import hook_stack as blocks
from storm_client import offloading
from storm_client.planner import in_flight as window
from storm_client.transport.connection import Connection
from storm_kernels.ancf import DType
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MIB = 1 << 20
WARM_UPS = 3
BUDGET = 0.0
"""Everything is offloaded, however little a step saves."""


class Case(NamedTuple):
    """Tensors of a step, all of `nbytes`; `work` in seconds of the host after each, both ways.

    The client holds back `held` bytes, or three tensors where that is more.
    """

    name: str
    nbytes: int
    codec: str
    tensors: int
    steps: int
    work: float
    held: int


CASES = (
    Case("small, held", MIB, "ancf", 64, 30, 4e-4, 1 << 30),
    Case("small", MIB, "ancf", 128, 20, 4e-4, 16 * MIB),
    Case("small, at once", MIB, "ancf", 128, 20, 0.0, 16 * MIB),
    Case("small, raw", MIB, "raw", 128, 20, 4e-4, 16 * MIB),
    Case("large, held", 32 * MIB, "ancf", 16, 12, 2e-3, 1 << 30),
    Case("large", 32 * MIB, "ancf", 24, 12, 4e-3, 0),
    Case("large, raw", 32 * MIB, "raw", 24, 12, 4e-3, 0),
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
    """Of each call: `pack` and `unpack` without, `pack_wait` and `unpack_wait` the waiting."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__(self._timed("pack", pack), self._timed("unpack", unpack))

    @classmethod
    def install(cls) -> None:
        """Have blocks put these on PyTorch's stack, around what they would put there."""
        push = blocks._push_hooks

        def push_timed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
            timed = cls(pack, unpack)
            push(timed.pack_hook, timed.unpack_hook)

        blocks._push_hooks = push_timed

    def _timed(self, name: str, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        working, waiting = self.seconds[name], self.seconds[f"{name}_wait"]

        def timed(argument: Any) -> Any:
            waited, began = Waits.seconds, time.perf_counter()
            result = hook(argument)
            seconds, waited = time.perf_counter() - began, Waits.seconds - waited
            working.append(seconds - waited)
            waiting.append(waited)
            return result

        return timed


class Waits:
    """Counts what hooks wait for the daemon: they run in one thread at a time, and only they do."""

    seconds = 0.0


def timed_wait(connection: Connection, deadline: float, every: float | None = None) -> bool:
    """Stand in for Connection.wait, and count what it takes."""
    began = time.perf_counter()
    try:
        return untimed_wait(connection, deadline, every)
    finally:
        Waits.seconds += time.perf_counter() - began


untimed_wait = Connection.wait


class Meter:
    """The processor time of a daemon and of this process, and the daemon's operations so far."""

    def __init__(self, daemon: ChildDaemon) -> None:
        self._process = psutil.Process(daemon.pid)
        self._status = daemon.status
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        flows = self._status()["throughput"]
        theirs, ours = self._process.cpu_times(), resource.getrusage(resource.RUSAGE_SELF)
        return thread_seconds(self._process.pid) | {
            "user": theirs.user,
            "system": theirs.system,
            "client": ours.ru_utime + ours.ru_stime,
            "store": flows["store"]["operations"],
            "restore": flows["restore"]["operations"],
        }

    def since(self) -> dict[str, Any]:
        """Return the operations since the start, and the time of each process for one of them."""
        spent = {name: now - self._before.get(name, 0.0) for name, now in self._read().items()}
        stores, restores = int(spent.pop("store")), int(spent.pop("restore"))
        each = {
            name: round(1e6 * one / max(1, stores + restores), 1) for name, one in spent.items()
        }
        client, user, system = (each.pop(name) for name in ("client", "user", "system"))
        by_thread = sorted(each.items(), key=lambda item: -item[1])
        return {
            "stores": stores,
            "restores": restores,
            "daemon_us": {"all": round(user + system, 1), "user": user, "system": system},
            "daemon_threads_us": {name: one for name, one in by_thread if one},
            "client_us": client,
        }


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the processor seconds of a process's threads, by name; those of one name together."""
    found: Counter[str] = Counter()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (thread / "comm").read_text().strip()
            spent = int((thread / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it has ended meanwhile
            continue
        found["thread loop" if thread.name == str(pid) else f"thread {name}"] += spent
    return found


def step(x: Tensor, case: Case, offload: offloading.Offload) -> None:
    """Save `case.tensors` tensors, and use them again."""
    with offload:
        for _ in range(case.tensors):
            x = OtherWork.apply(x.sin(), case.work)
    x.sum().backward()


def measure(case: Case, daemon: ChildDaemon, device: torch.device) -> dict[str, Any]:
    """Return the figures of one case."""
    torch.manual_seed(0)
    x = torch.randn(case.nbytes // 2, dtype=torch.bfloat16, device=device).requires_grad_()
    window.MIN_BYTES = case.held
    with storm.connect(daemon.address, embedded="never", timeout=30.0) as client:
        offload = client.offload(
            None, min_bytes=64 << 10, codec=case.codec, budget=BUDGET, replay=False
        )
        TimedHooks.seconds = {name: [] for name in ("pack", "pack_wait", "unpack", "unpack_wait")}
        for _ in range(WARM_UPS):
            step(x, case, offload)
        offload.stats()  # waits for what is in flight
        for seconds in TimedHooks.seconds.values():
            seconds.clear()
        meter = Meter(daemon)
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
    }


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
    """Have all that a daemon compiles in the cache on disk; return how many seconds that took.

    Otherwise that goes on beside the work that is measured, and is counted in its time.
    """
    from storm_kernels.ancf.cuda import CudaCodec

    began, codec = time.perf_counter(), CudaCodec()
    for modes in (("raw",), ("window",), ("auto",)):
        for _ in codec.prepare_each(DType, modes=modes):
            pass
    return time.perf_counter() - began


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pool", default="4GiB", help="the daemon's pool")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some cases")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    TimedHooks.install()
    Connection.wait = timed_wait
    found: dict[str, Any] = {"cases": []}
    if device.type == "cuda":
        found["compile_seconds"] = round(compile_codec(), 2)
    for case in CASES:
        if case.name not in options.only:
            continue
        staging = case.nbytes * case.tensors // 4
        flags = ["--device", device.type, "--pool-bytes", options.pool]
        flags += [f"--staging-bytes-{device.type}", str(staging)]
        flags += [f"--part-bytes-{device.type}", str(min(32 * MIB, staging // 2))]
        with ChildDaemon(flags=flags) as daemon:
            found["cases"].append(measure(case, daemon, device))
        print(json.dumps(found["cases"][-1]), flush=True)
    packages = ("torch", "cupy-cuda13x", "cuda-bindings", "pyzmq", "uvloop")
    record(options.json, found, *packages)


if __name__ == "__main__":
    main()
