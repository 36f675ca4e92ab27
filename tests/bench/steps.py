"""Ten thousand steps of a small model: what both processes hold, from the first to the last.

    PYTHONPATH=tests python -m bench.steps --steps 10000 --json tests/bench/results/steps.json

Batch sizes change from step to step, some forwards never see their backward, and PyTorch's cache
is emptied now and then, so that allocations come and go under the daemon's mappings. What stays
true: every fiftieth step's gradients are compared bit for bit with those without offload, and
memory that grows after the first fifth of the steps is an AssertionError and no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from support.waiting import wait_until
from torch import Tensor, nn

from stormd.machine import describe
from stormd.monitoring.nvml import open_nvml

MIB = 1 << 20
ROWS = (192, 256, 128, 320, 224)
WIDTH = {"cpu": 64, "cuda": 512}
LAYERS = 4
MIN_BYTES = 1 << 14
COMPARED, UNUSED, EMPTIED = 50, 7, 100
"""Every so many steps: gradients are compared, a forward has no backward, the cache is emptied."""

SAMPLES = 50
QUIET_SECONDS, QUIET_SHARE, START_SECONDS = 1.0, 0.05, 180.0
"""A daemon that takes less of a processor than the share, for so long, has started: the codec's
kernels for all element types are there, whose loading takes memory of its own."""

SETTLED_SHARE = 0.2
ALLOWED_GROWTH = {"resident": 0.03, "device": 0.0, "descriptors": 0.0, "threads": 0.0}
"""Of what was held when the first fifth was done. Resident memory has the allocators' noise."""

FLAGS = ["--pool-bytes=256MiB", "--staging-bytes-cuda=1MiB", "--part-bytes-cuda=256KiB"]


class Sample(NamedTuple):
    """Both processes after so many steps; None where the GPU's memory cannot be told apart."""

    steps: int
    trainer_resident_bytes: int
    daemon_resident_bytes: int
    trainer_descriptors: int
    daemon_descriptors: int
    trainer_threads: int
    daemon_threads: int
    pytorch_device_bytes: int | None
    trainer_device_bytes: int | None
    daemon_device_bytes: int | None


class Model:
    """A small network, and the gradients of each batch size without offload."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        width = WIDTH[device]
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
        self.net = nn.Sequential(*layers).to(device)
        self._batches = [torch.randn(rows, width, device=device) for rows in ROWS]
        self._expected = [self.step(number, nullcontext()) for number in range(len(ROWS))]

    def step(self, number: int, context: AbstractContextManager[object]) -> list[Tensor]:
        """Do a step on one of the batches; return its gradients."""
        self.net.zero_grad(set_to_none=True)
        with context:
            loss = self.net(self._batches[number % len(ROWS)]).square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in self.net.parameters()]

    def forward_alone(self, number: int, context: AbstractContextManager[object]) -> None:
        """Save what no backward will ask for."""
        with context:
            self.net(self._batches[number % len(ROWS)]).square().mean()

    def is_right(self, number: int, gradients: list[Tensor]) -> bool:
        """Tell whether the gradients are those without offload."""
        return all(map(torch.equal, gradients, self._expected[number % len(ROWS)]))


def run(steps: int, device: str) -> dict[str, Any]:
    """Take the steps and return what both sides held, having checked it."""
    model, samples = Model(device), []
    begin = time.monotonic()
    with (
        ChildDaemon(flags=[*FLAGS, f"--device={device}"], start_seconds=120.0) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        # With the least budget a GPU would keep what is so little.
        offload = client.offload(model.net, min_bytes=MIN_BYTES, budget=0.0)
        wait_until(lambda: _is_quiet(daemon.pid), START_SECONDS)
        for number in range(steps):
            if number % UNUSED == 0:
                model.forward_alone(number, offload)
            gradients = model.step(number, offload)
            if number % COMPARED == 0:
                assert model.is_right(number, gradients), f"step {number} is wrong"
            if number % EMPTIED == 0 and device == "cuda":
                torch.cuda.empty_cache()
            if (number + 1) % max(1, steps // SAMPLES) == 0:
                del gradients
                samples.append(_sample(number + 1, daemon.pid, device))
        stats = offload.stats()
        wait_until(lambda: client.status().entries == 0, found=client.status)
        assert client.status().pool.used_bytes == 0
    _check(samples)
    assert stats.offloaded_bytes > 0
    assert set(stats.kept) <= {"needed_at_once"}, stats.kept  # by a GPU's link
    return {
        "steps": steps,
        "seconds": time.monotonic() - begin,
        "offloaded_bytes": stats.offloaded_bytes,
        "ratio": stats.ratio,
        "columns": Sample._fields,
        "samples": samples,
    }


def _is_quiet(pid: int) -> bool:
    """Tell whether a process hardly runs; looks for a while."""
    return psutil.Process(pid).cpu_percent(QUIET_SECONDS) < 100 * QUIET_SHARE


def _sample(steps: int, daemon: int, device: str) -> Sample:
    here, there = psutil.Process(), psutil.Process(daemon)
    ours = _device_bytes(device)
    return Sample(
        steps=steps,
        trainer_resident_bytes=_resident_bytes(here),
        daemon_resident_bytes=_resident_bytes(there),
        trainer_descriptors=here.num_fds(),
        daemon_descriptors=there.num_fds(),
        trainer_threads=here.num_threads(),
        daemon_threads=there.num_threads(),
        pytorch_device_bytes=torch.cuda.memory_allocated() if device == "cuda" else None,
        trainer_device_bytes=ours.get(os.getpid()),
        daemon_device_bytes=ours.get(daemon),
    )


def _resident_bytes(process: psutil.Process) -> int:
    """Return the memory that is the process's alone.

    How much of a staging area was ever in use says how long the daemon was once kept waiting.
    """
    info = process.memory_info()
    return int(info.rss - info.shared)


def _device_bytes(device: str) -> dict[int, int]:
    """Return the GPU memory of each process, as far as the driver tells."""
    nvml = open_nvml() if device == "cuda" else None
    if nvml is None:
        return {}
    torch.cuda.empty_cache()  # what PyTorch keeps for later depends on where it happens to stand
    return nvml.process_bytes(str(torch.cuda.get_device_properties(0).uuid)) or {}


def _check(samples: list[Sample]) -> None:
    """Assert that nothing grew from the time when all was settled until the end."""
    settled = samples[int(SETTLED_SHARE * len(samples)) : len(samples) // 2]
    late = samples[-len(settled) :]
    for kind, allowed in ALLOWED_GROWTH.items():
        for name in (name for name in Sample._fields if kind in name):
            before = [getattr(one, name) for one in settled]
            after = [getattr(one, name) for one in late]
            if None not in before:
                limit = max(before) * (1 + allowed)
                assert min(after) <= limit, f"{name} grew from {max(before)} to {min(after)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.steps")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", choices=tuple(WIDTH), default=None)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "machine": describe() | {"command": f"python -m bench.steps --steps {args.steps}"},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "figures": run(args.steps, device),
    }
    args.json.write_text(json.dumps(result) + "\n")
    print(json.dumps({**result["figures"], "samples": result["figures"]["samples"][-2:]}, indent=2))


if __name__ == "__main__":
    main()
