"""Measures the step times and the peak memory of one method in this process.

A step is forward and backward, and the optimizer's step if the workload has one; else gradients are
dropped. The median counts, and the peak is that of the counted steps alone. On a GPU its own events
time the passes, so that work that is only queued does not count as done.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from storm_bench.devices import peak_bytes, reset_peak
from storm_bench.train.gpt import attention
from storm_bench.train.methods import Active, Method, Unavailable, method_of
from storm_bench.train.workloads import WORKLOADS, Training, make

__all__ = ["Model", "Trial", "measured"]

Times = tuple[float, float, float]
"""Seconds of a step, of its forward, of its backward."""

_Mark = torch.cuda.Event | float


@dataclass(frozen=True, slots=True)
class Trial:
    """What to measure: names of WORKLOADS and METHODS, and a daemon's address."""

    workload: str
    method: str
    device: torch.device
    address: str
    warm_ups: int
    steps: int


class Model:
    """The model that all trials of one workload train, made for the first of them."""

    def __init__(self, workload: str, device: torch.device) -> None:
        self._workload = workload
        self._device = device
        self._made: Training | None = None

    def training(self) -> Training:
        """Return the model and its tokens.

        Raises:
            ImportError: a package that the model needs is not installed.
        """
        if self._made is None:
            self._made = make(WORKLOADS[self._workload], self._device)
        return self._made

    def free_memory(self) -> None:
        """Free the memory that remains after a trial: gradients, and the allocator's cache."""
        if self._made is not None:
            self._made.module.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def measured(trial: Trial, model: Model | None = None) -> Iterator[dict[str, Any]]:
    """Yield the figures of a trial on `model`, or on a new model if None; or {"skipped": reason}.

    Until the context is left, the method keeps the memory that it held during the steps.
    """
    with ExitStack() as held:
        try:
            figures = _measure(held, trial, model or Model(trial.workload, trial.device))
        except (Unavailable, ImportError, torch.OutOfMemoryError) as error:
            figures = {"skipped": f"{error}".partition("\n")[0][:300]}
        yield figures


def _measure(held: ExitStack, trial: Trial, model: Model) -> dict[str, Any]:
    method, device = method_of(trial.method), trial.device
    training = model.training()
    active = held.enter_context(method.enter(training.module, device, trial.address))

    def step() -> Times:
        return _step(training, active, method)

    with attention(device):
        return _figures(step, active, trial)


def _figures(step: Callable[[], Times], active: Active, trial: Trial) -> dict[str, Any]:
    device = trial.device
    for _ in range(trial.warm_ups):
        step()
    before = active.figures()
    reset_peak(device)
    times = [step() for _ in range(trial.steps)]
    seconds, forwards, backwards = zip(*times, strict=True)
    figures: dict[str, Any] = {
        "step_seconds": median(seconds),
        "forward_seconds": median(forwards),
        "backward_seconds": median(backwards),
        "steps_seconds": list(seconds),
        "peak_bytes": peak_bytes(device),
    }
    if device.type == "cuda":
        figures["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        properties = torch.cuda.get_device_properties(device)
        figures["device_name"], figures["device_uuid"] = properties.name, str(properties.uuid)
    return figures | _of_a_step(before, active.figures(), trial.steps)


def _step(training: Training, active: Active, method: Method) -> Times:
    """Run one step. Methods that would copy every saved tensor do not cover the head and loss."""
    net, tokens, optimizer = training.net, training.tokens, training.optimizer
    marks = [_mark(tokens.device)]
    begin = time.perf_counter()
    x = net.embed(tokens)
    with active.context():
        for block in net.blocks:
            x = method.run(block, x)
        if active.covers_loss:
            loss = method.loss(net, x, training.targets)
    if not active.covers_loss:
        loss = method.loss(net, x, training.targets)
    marks.append(_mark(tokens.device))
    loss.backward()  # type: ignore[no-untyped-call]  # torch's gap
    if optimizer is not None:
        optimizer.step()
    training.module.zero_grad(set_to_none=True)
    marks.append(_mark(tokens.device))
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    seconds = time.perf_counter() - begin
    return seconds, _between(marks[0], marks[1]), _between(marks[1], marks[2])


def _mark(device: torch.device) -> _Mark:
    """Return a mark of the present moment: in the device's stream, or in the host's time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's gap
    event.record(torch.cuda.current_stream(device))
    return event


def _between(one: _Mark, other: _Mark) -> float:
    """Return the seconds between two marks of one kind, both of which have been reached."""
    if isinstance(one, float) or isinstance(other, float):
        assert isinstance(one, float)
        assert isinstance(other, float)
        return other - one
    return float(one.elapsed_time(other)) / 1e3


def _of_a_step(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the method's own figures: bytes and seconds per counted step, the rest unchanged."""
    counted = {
        name: (value - before[name]) / steps
        for name, value in after.items()
        if name.endswith(("_bytes", "_seconds"))
    }
    return {"offload": {**after, **counted}} if after else {}
