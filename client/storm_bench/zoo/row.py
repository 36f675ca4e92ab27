"""Measures the step time and memory of one model by one method in this process.

A step is forward, backward and AdamW. The median of the last steps counts. Medians along the way
are shown too, so that one sees how a plan is found.
"""

from __future__ import annotations

import hashlib
import re
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import storm_client as storm
import torch
from torch import Tensor, nn

from storm_bench.devices import peak_bytes, reset_peak
from storm_bench.train.methods import Unavailable
from storm_bench.zoo.methods import METHODS
from storm_bench.zoo.models import WORKLOADS, Size, Workload

if TYPE_CHECKING:
    from storm_client.planner.plan import Plan

__all__ = ["Training", "Trial", "measure"]

_GIB: Final = 1 << 30
_WINDOW: Final = 8
_STRIDE: Final = 12
_FIRST: Final = 4
"""Medians of `_WINDOW` steps are shown, one every `_STRIDE` steps, from step `_FIRST` on."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What to measure: names of WORKLOADS and METHODS, and how."""

    model: str
    method: str
    budget: str | None
    size: Size
    warm_ups: int
    steps: int
    ranks: str = ""
    """"ddp" or "fsdp" if several ranks train the model; their process group exists already."""
    shows_plan: bool = False
    """Whether the plan's table is printed to standard error."""


def measure(trial: Trial) -> dict[str, Any]:
    """Return the row of a trial, or the reason why it was skipped, as JSON values."""
    row: dict[str, Any] = {"model": trial.model, "method": trial.method}
    if trial.budget is not None:
        row["budget"] = trial.budget
    device = trial.size.device
    if device.type != "cuda" and not trial.size.is_small:
        return row | {"skipped": "there is no GPU here; --small tries it on the CPU"}
    try:
        return row | Training(trial).measure()
    except (Unavailable, ImportError, torch.OutOfMemoryError) as error:
        return row | {"skipped": f"{error}".partition("\n")[0][:300]}


class Training:
    """A model that is trained by a method."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._device = trial.size.device
        torch.manual_seed(0)
        self._workload: Workload = WORKLOADS[trial.model](trial.size)
        method = METHODS[trial.method]
        model = self._workload.model.train()
        method.change(model)
        self._model = _of_ranks(trial.ranks, model) if trial.ranks else model
        self.context = method.enter(self._model, trial.budget)
        places = {one.device for one in self._model.parameters()}
        self._devices = {one for one in places if one.type == self._device.type}
        trained = [one for one in self._model.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=self._is_on_gpu)
        is_scaled = self._workload.autocast == torch.float16
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=is_scaled)

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def measure(self) -> dict[str, Any]:
        """Train, and return the figures of the steps that count."""
        trial = self._trial
        on_the_way = [self.step(number)[0] for number in range(trial.warm_ups)]
        for device in self._devices:
            reset_peak(device)
        before = self._counts()
        found = [self.step(trial.warm_ups + number) for number in range(trial.steps)]
        counted = [seconds for seconds, _ in found]
        seconds = on_the_way + counted
        return {
            "ms": round(1e3 * statistics.median(counted), 1),
            "way_ms": [
                round(1e3 * statistics.median(seconds[at : at + _WINDOW]))
                for at in range(_FIRST, len(seconds) - _WINDOW, _STRIDE)
            ],
            **self._memory(),
            "loss": found[-1][1].item(),
            **self._offloaded(before),
        }

    def step(self, number: int) -> tuple[float, Tensor]:
        """Return the seconds of a step and its loss."""
        torch.manual_seed(number)
        begun = self._now()
        with self.context, self._autocast():
            loss = self._workload.loss(self._model)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's gap
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return self._now() - begun, loss

    def _now(self) -> float:
        if self._is_on_gpu:
            for device in self._devices:
                torch.cuda.synchronize(device)
        return time.perf_counter()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._workload.autocast
        return torch.autocast(self._device.type, dtype) if dtype else nullcontext()

    def _memory(self) -> dict[str, Any]:
        """Return the memory figures of the device with the highest peak."""
        device = max(self._devices, key=peak_bytes)
        peak = peak_bytes(device)
        if not self._is_on_gpu:
            return {"peak_gib": round(peak / _GIB, 2)}
        beyond = torch.cuda.max_memory_reserved(device) - peak
        free, total = torch.cuda.mem_get_info(device)
        return {
            "peak_gib": round(peak / _GIB, 2),
            "beyond_gib": round(beyond / _GIB, 2),
            "held_gib": round((total - free) / _GIB, 2),
            "device": torch.cuda.get_device_name(device),
        }

    def _counts(self) -> tuple[int, int]:
        """Return the bytes offloaded and recomputed so far."""
        if not isinstance(self.context, storm.Offload):
            return 0, 0
        stats = self.context.stats()
        return stats.offloaded_bytes, stats.replayed_bytes

    def _offloaded(self, before: tuple[int, int]) -> dict[str, Any]:
        """Return how much a counted step offloaded and recomputed, and by which plan."""
        offload = self.context
        if not isinstance(offload, storm.Offload):
            return {}
        each = [
            round((now - then) / self._trial.steps / _GIB, 2)
            for now, then in zip(self._counts(), before, strict=True)
        ]
        row = {"offloaded_gib": each[0], "replayed_gib": each[1]}
        row |= _planned(offload.plan, shows=self._trial.shows_plan)
        if self._trial.ranks:
            row["plans_are_equal"] = _are_equal(offload.plan)
        return row


def _of_ranks(mode: str, model: Any) -> nn.Module:
    """Return the model as each rank trains it."""
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model  # type: ignore[no-any-return]  # it is the same


def _planned(plan: Plan | None, *, shows: bool) -> dict[str, Any]:
    """Return the plan's predictions, and the comparison with other plans."""
    if plan is None:
        return {}
    if shows:
        sys.stderr.write(f"{plan}\n")
    settled = re.search(r"settled after (\d+) steps", plan.compared)
    return {
        "settled_steps": int(settled[1]) if settled else None,
        "plan": {
            "forward_ms": round(1e3 * plan.forward_seconds, 1),
            "link_ms": round(1e3 * plan.link_seconds, 1),
            "recompute_ms": round(1e3 * plan.replay_seconds, 1),
            "gib": {name: round(n / _GIB, 2) for name, n in plan.bytes_by_decision.items()},
            "compared": plan.compared,
        },
    }


def _are_equal(plan: Plan | None) -> bool:
    """Return whether all ranks have the same decisions; each rank must call it."""
    rows = () if plan is None else plan.rows
    decided = [(row.operation, tuple(row.shape), row.decision) for row in rows]
    digest = hashlib.sha256(repr(decided).encode()).hexdigest()
    digests: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, digest)
    return len(set(digests)) == 1
