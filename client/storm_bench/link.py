"""Measures store and restore through the daemon, codec raw, against two memcpys.

Run as `python -m storm_bench.link`. Prints one JSON object. Both sides of a comparison move the
same bytes away and back, and the best round of each counts. Every restored tensor is compared with
the original.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import storm_client as storm
import torch
from torch import Tensor

__all__ = ["main"]

_SMALL_BYTES: Final = 4096
"""Size of a tensor whose copy takes under a microsecond: the hook's own time remains."""


class _Save(torch.autograd.Function):
    """Saves tensors in the forward pass, and gives restored ones to `receive` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: Callable[[Tensor], None], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.receive = receive
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for tensor in ctx.saved_tensors:
            ctx.receive(tensor)
        return (gradients[0], None, *(None for _ in ctx.needs_input_grad[2:]))


@dataclass(slots=True)
class Round:
    """Seconds of one store and restore of all tensors; cpu is this thread's processor time."""

    store: float = 0.0
    restore: float = 0.0
    store_cpu: float = 0.0
    restore_cpu: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of both ways."""
        return self.store + self.restore


def main(arguments: list[str] | None = None) -> None:
    """Measure as the arguments say and print the figures."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    with storm.connect(args.address, embedded="never") as client:
        large = _measure_large(client, args.tensors, args.nbytes, args.rounds)
        small = _measure_small(client, args.operations, args.rounds, args.daemon_pid)
    sys.stdout.write(json.dumps({**large, **small}) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m storm_bench.link")
    parser.add_argument("--address", required=True)
    parser.add_argument("--daemon-pid", type=int, required=True)
    for name in ("tensors", "nbytes", "rounds", "operations"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def _measure_large(client: storm.Client, count: int, nbytes: int, rounds: int) -> dict[str, Any]:
    tensors = _random_tensors(count, nbytes)
    offload = client.offload(torch.nn.Identity(), min_bytes=nbytes, codec="raw")
    # in turns, so that both meet the same disturbances
    pairs = [(_one_round(offload, tensors), _two_memcpys(tensors)) for _ in range(rounds)]
    link = min((one for one, _ in pairs), key=lambda one: one.total)
    copies = min(seconds for _, seconds in pairs)
    stats = offload.stats()
    moved = count * nbytes
    return {
        "bytes": moved,
        "link_seconds": link.total,
        "store_seconds": link.store,
        "restore_seconds": link.restore,
        "memcpy_seconds": copies,
        "link_bytes_per_second": moved / link.total,
        "memcpy_bytes_per_second": moved / copies,
        "link_to_memcpy": copies / link.total,
        "kept_bytes": stats.kept_bytes,
        "offloaded_bytes": stats.offloaded_bytes,
    }


def _measure_small(
    client: storm.Client, count: int, rounds: int, daemon_pid: int
) -> dict[str, Any]:
    tensors = _random_tensors(count, _SMALL_BYTES)
    offload = client.offload(torch.nn.Identity(), min_bytes=_SMALL_BYTES, codec="raw")
    _one_round(offload, tensors)  # in the first round the client learns the order
    clock = _cpu_clock(daemon_pid)
    before = time.clock_gettime(clock)
    measured = [_one_round(offload, tensors) for _ in range(rounds)]
    spent = time.clock_gettime(clock) - before
    return {
        "operations": 2 * count * rounds,
        "hook_store_seconds": fmean(one.store_cpu for one in measured) / count,
        "hook_restore_seconds": fmean(one.restore_cpu for one in measured) / count,
        "daemon_seconds_per_operation": spent / (2 * count * rounds),
        "small_round_seconds": fmean(one.total for one in measured),
    }


def _random_tensors(count: int, nbytes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
        for _ in range(count)
    ]


def _one_round(offload: Any, tensors: list[Tensor]) -> Round:
    """Store and restore a copy of every tensor; the copies are freed in between."""
    measured = Round()
    back: list[Tensor] = []
    leaf = torch.zeros(1, requires_grad=True)
    copies = [tensor.clone() for tensor in tensors]
    with _timed(measured, "store"), offload:
        out = _Save.apply(leaf, back.append, *copies)  # type: ignore[no-untyped-call]
        copies.clear()  # a copy that is alive and unmodified would not be restored
    with _timed(measured, "restore"):
        out.sum().backward()
    for tensor, same in zip(tensors, back, strict=True):
        if not torch.equal(tensor, same):
            raise RuntimeError("a tensor came back changed: report this as a bug")
    return measured


@contextmanager
def _timed(measured: Round, name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.thread_time()
    yield
    setattr(measured, name, time.perf_counter() - wall)
    setattr(measured, f"{name}_cpu", time.thread_time() - cpu)


def _two_memcpys(tensors: list[Tensor]) -> float:
    """Return the seconds to copy every tensor away and back; all pages were touched before."""
    away = [torch.full_like(tensor, 1) for tensor in tensors]
    back = [torch.full_like(tensor, 1) for tensor in tensors]
    started = time.perf_counter()
    for tensor, copy in zip(tensors, away, strict=True):
        copy.copy_(tensor)
    for copy, tensor in zip(away, back, strict=True):
        tensor.copy_(copy)
    return time.perf_counter() - started


def _cpu_clock(pid: int) -> int:
    """Return the clock of a process's processor time: in ns, while /proc counts in 10 ms."""
    clock = ctypes.c_int()
    status = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if status:
        raise OSError(status, f"the processor time of {pid}: {os.strerror(status)}")
    return clock.value


if __name__ == "__main__":
    main()
