"""What a GPU computes and moves in a second, measured before the first step.

A graph is planned before it runs, from its operations' arithmetic and memory traffic. Rates differ
tenfold between GPUs, so they are measured: by the device's own clock, in some milliseconds, in
memory that PyTorch does not get to see. Plans rest on them, and no bit does.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Final

import torch
from storm_kernels.errors import KernelsError

from storm_client.devices import is_capturing
from storm_client.planner.machine import DeviceRates

__all__ = ["rates_of"]

log = logging.getLogger(__name__)

NBYTES: Final = 256 << 20
"""Memory for the measurement: one half is copied to the other, which no GPU's cache holds."""

HALF_WIDTH: Final = 4096
SINGLE_WIDTH: Final = 2048
"""Rows and columns of the multiplied matrices."""

IN_TRAINING: Final = 0.8
"""Share of a large kernel's rate that a training's kernels reach: each has a beginning and an end,
and few fit the device as well. One H200: so a graph's forward pass takes as long as estimated."""

REPEATS: Final = 64
"""Of each operation. The later half counts: by then the device has the clock rate and power that
it keeps."""

_rates: dict[tuple[torch.device, str], DeviceRates | None] = {}
_lock = threading.Lock()


def rates_of(device: torch.device) -> DeviceRates | None:
    """Return a GPU's rates, measured once for each precision that PyTorch is set to.

    None: the device is no GPU, or its rates cannot be measured.
    """
    if device.type != "cuda":
        return None
    key = device, torch.get_float32_matmul_precision()
    with _lock:
        if key not in _rates:
            if is_capturing(device):
                return None
            _rates[key] = _measured(device)
        return _rates[key]


def _measured(device: torch.device) -> DeviceRates | None:
    try:
        from storm_kernels.cuda_driver import DeviceBuffer

        with (
            torch.no_grad(),
            torch.autocast("cuda", enabled=False),
            torch.cuda.device(device),
            closing(DeviceBuffer(NBYTES)) as buffer,
        ):
            return _measured_in(torch.as_tensor(_Memory(buffer.address), device=device))
    except (KernelsError, RuntimeError) as error:
        log.warning("the rates of %s are not measured, so plans assume others: %s", device, error)
        return None


def _measured_in(memory: torch.Tensor) -> DeviceRates:
    """Measure in memory that nobody else uses, to two digits: so runs that are alike plan alike."""
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    first, second = memory.chunk(2)
    found = (
        _flops(memory, half, HALF_WIDTH),
        _flops(memory, torch.float32, SINGLE_WIDTH),
        2 * first.nbytes / _seconds(lambda: first.copy_(second)),
    )
    return DeviceRates(*(float(f"{IN_TRAINING * rate:.2g}") for rate in found))


def _flops(memory: torch.Tensor, dtype: torch.dtype, width: int) -> float:
    """Return the operations a second of a product of square matrices.

    Their values are random: products of equal ones need less power, and a GPU is faster at them.
    """
    matrices = memory.view(dtype)[: 3 * width * width].view(3, width, width)
    matrices.normal_(generator=torch.Generator(memory.device))
    seconds = _seconds(lambda: torch.mm(matrices[0], matrices[1], out=matrices[2]))
    return 2.0 * width**3 / seconds


def _seconds(operation: Callable[[], object]) -> float:
    timed = partial(torch.cuda.Event, enable_timing=True)
    events = [timed() for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        operation()
        event.record()
    events[-1].synchronize()
    milliseconds: list[float] = [one.elapsed_time(other) for one, other in pairwise(events)]
    return max(statistics.median(milliseconds[REPEATS // 2 :]), 1e-3) / 1e3


class _Memory:
    """Device memory of the driver, as PyTorch takes it from other libraries."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (NBYTES,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
