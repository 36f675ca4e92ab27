"""How much slower a large matrix product is while tensors are encoded and leave over the link.

One process, as in training: the product on one stream, encoding on a second, the blobs' copies to
pinned memory on a third, which hold the encoder to the link's speed. What stays true: each figure
is the median over pairs of runs of equal length, one alone and one beside, taken in turn.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from codec_gpu_cases import BF16, MIB
from codec_gpu_job import Job
from storm_kernels.ancf.cuda import CudaCodec

ORDER = 8192  # of the square matrices
PRODUCTS = 24
TENSOR_BYTES = 64 * MIB
HEAD_START_CYCLES = 40_000_000  # ~20 ms, within which everything of a run must have been issued
LINK_BYTES_PER_MS = 56e6
SLOTS = 2


class Traffic:
    """Blobs on their way to host memory, encoded first unless `blocks` is None."""

    def __init__(self, blocks: int | None) -> None:
        codec = CudaCodec(blocks=blocks or 0)
        tensor = BF16(TENSOR_BYTES)
        self._jobs = [Job(codec, tensor, "fast", checksum=True) for _ in range(SLOTS)]
        for job in self._jobs:
            job.check()
        self.blob_bytes = self._jobs[0].size
        self._host = [
            torch.empty(self.blob_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(SLOTS)
        ]
        self._encodes = blocks is not None
        self._encoding, self._copying = torch.cuda.Stream(), torch.cuda.Stream()

    def issue(
        self, after: torch.cuda.Event, times: int
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Put `times` blobs on their way once `after` has passed.

        Returns events before the first copy and after the last.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        encoded, copied = ([torch.cuda.Event() for _ in range(SLOTS)] for _ in range(2))
        self._encoding.wait_event(after)
        self._copying.wait_event(after)
        begin.record(self._copying)
        for turn in range(times):
            slot = turn % SLOTS
            if self._encodes:
                self._encode(slot, None if turn < SLOTS else copied[slot], encoded[slot])
                self._copying.wait_event(encoded[slot])
            with torch.cuda.stream(self._copying):
                blob = self._jobs[slot].blob[: self.blob_bytes]
                self._host[slot].copy_(blob, non_blocking=True)
                copied[slot].record()
        end.record(self._copying)
        return begin, end

    def _encode(self, slot: int, free: torch.cuda.Event | None, done: torch.cuda.Event) -> None:
        if free is not None:
            self._encoding.wait_event(free)
        with torch.cuda.stream(self._encoding):
            self._jobs[slot].encode()
            done.record()


class Products:
    """The matrix products whose time is taken."""

    def __init__(self) -> None:
        self._a, self._b = (
            torch.randn(ORDER, ORDER, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self._c = torch.empty_like(self._a)
        torch.mm(self._a, self._b, out=self._c)  # loads what the first product needs

    def milliseconds(self, traffic: Traffic | None, times: int) -> tuple[float, float]:
        """Return the products' time, and the GB/s at which blobs left beside them."""
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        copies = traffic.issue(begin, times) if traffic else None
        for _ in range(PRODUCTS):
            torch.mm(self._a, self._b, out=self._c)
        end.record()
        late = begin.query()
        issued = time.perf_counter() - started
        torch.cuda.synchronize()
        if late:
            sys.exit(f"issuing took {1e3 * issued:.1f} ms, longer than the device waited")
        rate = (
            traffic.blob_bytes * times / copies[0].elapsed_time(copies[1]) / 1e6 if copies else 0.0
        )
        return begin.elapsed_time(end), rate


def pair_of_runs(
    products: Products, traffic: Traffic | None, times: int, *, beside_first: bool
) -> tuple[float, float]:
    """Return the products' speed beside `traffic` relative to alone, and the blobs' GB/s."""
    if beside_first:
        beside, rate = products.milliseconds(traffic, times)
        alone, _ = products.milliseconds(None, 0)
    else:
        alone, _ = products.milliseconds(None, 0)
        beside, rate = products.milliseconds(traffic, times)
    return alone / beside, rate


def compare(products: Products, traffic: Traffic | None, pairs: int, alone_ms: float) -> dict:
    """Return the products' relative speed over `pairs` pairs; without traffic it is the noise."""
    times = 0
    if traffic is not None:  # a little more than fits, so that no product is without company
        times = 1 + int(1.15 * alone_ms * LINK_BYTES_PER_MS / traffic.blob_bytes)
    pair_of_runs(products, traffic, times, beside_first=True)  # warms up
    runs = [
        pair_of_runs(products, traffic, times, beside_first=pair % 2 == 0) for pair in range(pairs)
    ]
    relative = [speed for speed, _ in runs]
    quarters = statistics.quantiles(relative, n=4)
    return {
        "pairs": pairs,
        "relative_speed": round(quarters[1], 4),
        "quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "least_and_most": [round(min(relative), 4), round(max(relative), 4)],
        "blob_gbps": round(statistics.median(rate for _, rate in runs), 1),
    }


def beside_gemm(pairs: int) -> list[dict]:
    """Return one row for each kind of company the products had."""
    products = Products()
    alone_ms = statistics.median(products.milliseconds(None, 0)[0] for _ in range(5))
    teraflops = 2 * ORDER**3 * PRODUCTS / alone_ms / 1e9
    companies = {"nothing": None, "copies alone": Traffic(None)}
    for blocks in (4, 8, 16, 32):
        companies[f"encoding on {blocks} blocks, and copies"] = Traffic(blocks)
    companies["encoding on all blocks, and copies"] = Traffic(0)
    rows = []
    for name, traffic in companies.items():
        row = {"beside": name, "gemm_tflops_alone": round(teraflops, 1)}
        row |= compare(products, traffic, pairs, alone_ms)
        rows.append(row)
        low, high = row["quartiles"]
        print(
            f"GEMM beside {name:34} {row['relative_speed']:.4f} of its speed "
            f"(half of {pairs} pairs within {low:.4f} and {high:.4f}), "
            f"blobs at {row['blob_gbps']} GB/s",
            flush=True,
        )
    return rows
