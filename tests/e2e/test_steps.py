"""Many steps leave memory flat on both sides.

Batch sizes change from step to step, some forwards never see their backward, and PyTorch's cache
is emptied now and then, so that allocations come and go under the daemon's mappings.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import psutil
import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from support.devices import DEVICES
from support.waiting import wait_until
from torch import Tensor, nn

from stormd.monitoring.nvml import open_nvml

STEPS = {"cpu": 200, "cuda": 400}
ROWS = (192, 256, 128, 320, 224)
WIDTH = {"cpu": 64, "cuda": 512}
COMPARED, UNUSED, EMPTIED, SAMPLED = 50, 7, 100, 8
"""Every so many steps: gradients are compared, a forward has no backward, the cache is emptied, and
both sides are looked at."""

QUIET_SECONDS, QUIET_SHARE, START_SECONDS = 0.5, 0.05, 180.0
"""A daemon that takes less of a processor than the share, for so long, has started: the codec's
kernels for all element types are there, whose loading takes memory of its own."""

ALLOWED_GROWTH = {"resident": 0.03, "device": 0.0, "descriptors": 0.0, "threads": 0.0}
"""Of what was held in the first half. Resident memory has the allocators' noise."""

FLAGS = ["--pool-bytes=256MiB", "--staging-bytes-cuda=1MiB", "--part-bytes-cuda=256KiB"]

Held = dict[str, int]


class Model:
    """A small network, and the gradients of each batch size without offload."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        width = WIDTH[device]
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
        self.net = nn.Sequential(*layers).to(device)
        self._batches = [torch.randn(rows, width, device=device) for rows in ROWS]
        self._expected = [self.step(number, nullcontext()) for number in range(len(ROWS))]

    def forward(self, number: int, context: AbstractContextManager[object]) -> Tensor:
        with context:
            loss: Tensor = self.net(self._batches[number % len(ROWS)]).square().mean()
        return loss

    def step(self, number: int, context: AbstractContextManager[object]) -> list[Tensor]:
        """Do a step on one of the batches; return its gradients."""
        self.net.zero_grad(set_to_none=True)
        self.forward(number, context).backward()
        return [parameter.grad.clone() for parameter in self.net.parameters()]

    def is_right(self, number: int, gradients: list[Tensor]) -> bool:
        return all(map(torch.equal, gradients, self._expected[number % len(ROWS)]))


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_flat_over_many_steps(device: str) -> None:
    model, samples = Model(device), list[Held]()
    with (
        ChildDaemon(flags=[*FLAGS, f"--device={device}"], start_seconds=120.0) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        # With the least budget a GPU would keep what is so little.
        offload = client.offload(model.net, min_bytes=1 << 14, budget=0.0)
        wait_until(lambda: _is_quiet(daemon.pid), START_SECONDS)
        for number in range(STEPS[device]):
            if number % UNUSED == 0:
                model.forward(number, offload)
            gradients = model.step(number, offload)
            if number % COMPARED == 0:
                assert model.is_right(number, gradients), f"step {number} is wrong"
            if number % EMPTIED == 0 and device == "cuda":
                torch.cuda.empty_cache()
            if number % SAMPLED == 0:
                del gradients
                samples.append(_held(daemon.pid, device))
        stats = offload.stats()
        wait_until(lambda: client.status().entries == 0, found=client.status)
        assert client.status().pool.used_bytes == 0
    _assert_flat(samples)
    assert stats.offloaded_bytes > STEPS[device] << 16
    assert set(stats.kept) <= {"needed_at_once"}, stats.kept  # by a GPU's link


def _is_quiet(pid: int) -> bool:
    """Tell whether a process hardly runs; looks for a while."""
    return psutil.Process(pid).cpu_percent(QUIET_SECONDS) < 100 * QUIET_SHARE


def _held(daemon: int, device: str) -> Held:
    """Return what both processes hold; on a GPU as far as the driver tells it apart."""
    found: Held = {}
    for name, pid in (("trainer", os.getpid()), ("daemon", daemon)):
        process = psutil.Process(pid)
        info = process.memory_info()
        # How much of a staging area was ever in use says how long the daemon was kept waiting.
        found[f"{name} resident"] = info.rss - info.shared
        found[f"{name} descriptors"] = process.num_fds()
        found[f"{name} threads"] = process.num_threads()
        if device == "cuda":
            torch.cuda.empty_cache()  # what PyTorch keeps for later depends on where it stands
            nvml = open_nvml()
            uuid = str(torch.cuda.get_device_properties(0).uuid)
            by_pid = (nvml.process_bytes(uuid) if nvml else None) or {}
            found[f"{name} device"] = by_pid.get(pid, 0)
            found["pytorch device"] = torch.cuda.memory_allocated()
    return found


def _assert_flat(samples: list[Held]) -> None:
    """Compare what was held from the time when all was settled with what was at the end."""
    settled = samples[len(samples) // 5 : len(samples) // 2]
    late = samples[-len(settled) :]
    for name in samples[0]:
        before, after = ([one[name] for one in some] for some in (settled, late))
        limit = max(before) * (1 + ALLOWED_GROWTH[name.partition(" ")[2]])
        assert min(after) <= limit, f"{name} grew from {max(before)} to {min(after)}"
