"""Performance figures of a machine. Every plan, of hooks and of graphs, is based on them.

The planner compares three ways to provide a saved tensor in the backward pass: keep it, offload and
restore it, or recompute it. All hardware figures of that comparison are in this file, so that there
is one place to enter measurements. No figure affects the bits of a tensor: a wrong one costs only
time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from stormd.protocol import Pong

__all__ = [
    "CPU",
    "CUDA",
    "DeviceRates",
    "Machine",
    "TransferFigures",
    "expected_ratio",
    "machine_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Figures of one type of device and its host."""

    # --- offload and restore ---
    link: float
    """Seconds per uncompressed byte on the link, one way."""
    codec: float
    """Seconds of the training device for encoding and decoding one byte, both together."""
    hides: bool
    """Whether transfers on the link overlap with computation."""
    fetch_latency: float
    """Seconds of a fetch beyond the link time: the daemon looks the tensor up, decodes and
    answers."""
    ahead: float
    """Bytes that the link can transfer during one long kernel. Large products and attention occupy
    the device fully, so the codec's kernels run only between two of them."""

    # --- the training thread ---
    thread_store: float
    """Seconds to offload one tensor by hooks, both passes together; the measured time once
    known."""
    graph_store: float
    """Seconds to offload one tensor by a compiled graph, as far as nothing hides them."""
    thread_recompute: float
    """Least seconds for recomputing one operation: its launch; the measured time once known."""

    # --- computing ---
    unmeasured: float
    """Seconds per byte of the result, for an operation that was not measured."""
    unmeasured_expensive: float
    """The same for products and attention; infinity if only measured ones are recomputed."""
    half_flops: float
    """Floating-point operations a second in half-precision products."""
    single_flops: float
    """The same in single-precision products, rounded (TF32) or not as PyTorch is set."""
    bandwidth: float
    """Bytes of memory traffic a second."""

    measured: frozenset[str] = frozenset()
    """What was measured on this machine: "link", "codec", "thread", "launches", "device" (its
    rates); the other figures are defaults."""

    def compressing(self, ratio: float) -> Machine:
        """Return the figures for data that is compressed by `ratio` on the link."""
        return replace(self, link=self.link / ratio)

    @property
    def longest_beside(self) -> float:
        """Longest kernel, in seconds, during which the link still has data to transfer."""
        return self.ahead * self.link

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Machine:
        """Return the figures that `dataclasses.asdict` has made of others, through JSON or not."""
        return cls(**{**fields, "measured": frozenset(fields["measured"])})

    def with_transfers(self, figures: TransferFigures) -> Machine:
        """Return the figures with what the daemon measured of link and codec, or limits."""
        known = {"link": figures.link, "codec": figures.coding}
        return replace(
            self,
            link=self.link_by(figures),
            codec=figures.coding or self.codec,
            measured=self.measured.union(name for name, figure in known.items() if figure),
        )

    def with_rates(self, rates: DeviceRates) -> Machine:
        """Return the figures with the device's measured rates.

        The codec's kernels only move memory: unmeasured, they are as much slower as the memory is.
        """
        is_known = "codec" in self.measured
        codec = self.codec if is_known else self.codec * self.bandwidth / rates.bandwidth
        names = self.measured | {"device"}
        return replace(self, **rates._asdict(), codec=codec, measured=names)

    def with_thread(self, store: float | None, recompute: float | None) -> Machine:
        """Return the figures with the thread's measured times; None: not measured yet.

        Where the thread computes, it does not launch: the time of its operations is theirs.
        """
        figures = self
        if store is not None:
            figures = replace(figures, thread_store=store, measured=self.measured | {"thread"})
        if recompute is not None and self.hides:
            names = figures.measured | {"launches"}
            figures = replace(figures, thread_recompute=recompute, measured=names)
        return figures

    def link_by(self, figures: TransferFigures) -> float:
        """Return seconds per byte on the link: the slowest of copies, limit and disk."""
        return max(figures.link or self.link, figures.limit, figures.disk)


class TransferFigures(NamedTuple):
    """A device's link and codec as the daemon reports them, in seconds a byte; 0.0 if not known."""

    link: float = 0.0
    """Speed of the session's latest copies in the slower direction, while others may have
    copied."""
    limit: float = 0.0
    """Least time that the daemon's settings allow."""
    coding: float = 0.0
    """Time of the device for encoding and decoding, if no other kernels delay it."""
    disk: float = 0.0
    """Busy time of the daemon's disk tier for each byte that enters or leaves the pool. The disk
    transfers overlap with the link."""

    @classmethod
    def of(cls, speeds: Pong) -> TransferFigures:
        """Return the figures that an answer to Ping reports."""
        told = (getattr(speeds, name) for name in cls._fields)
        return cls(*(1 / one if one else 0.0 for one in told))


class DeviceRates(NamedTuple):
    """What a device computes and moves in a second, as measured; see `Machine`."""

    half_flops: float
    single_flops: float
    bandwidth: float


CUDA = Machine(
    # One H200 on PCIe 5: a pinned copy each way.
    link=1 / 55e9,
    # One H200: a kernel each way, which reads and writes once.
    codec=1.5e-12,
    hides=True,
    # One H200: chosen for compiled graphs, not measured by itself.
    fetch_latency=1e-3,
    # One H200: what a session's scratch holds; the link needs 4 ms for it.
    ahead=2.2e8,
    # One H200, 16 Xeon cores, PyTorch 2.11. Used until it is measured, as `unmeasured` is.
    thread_store=1.5e-4,
    # A compiled graph's thread runs ahead of the device, which hides most of `thread_store`.
    graph_store=2e-5,
    # Assumed: the launch of a kernel from Python. Used until it is measured.
    thread_recompute=2.5e-5,
    # Assumed: elementwise kernels, which read and write once; not measured.
    unmeasured=5e-13,
    unmeasured_expensive=math.inf,
    # One H200: large products, and several fused elementwise operations.
    half_flops=6.5e14,
    single_flops=5e13,
    bandwidth=3e12,
)
"""A data-centre GPU on PCIe 5."""

CPU = Machine(
    # Orders of magnitude: the training cores also copy and encode, so nothing overlaps.
    link=1 / 1.5e9,
    codec=1 / 1.5e9,
    hides=False,
    fetch_latency=0.0,
    ahead=math.inf,
    thread_store=1.5e-4,
    graph_store=1.5e-4,
    thread_recompute=2e-5,
    # Orders of magnitude: other work on the cores would dominate a measurement.
    unmeasured=1 / 5e9,
    unmeasured_expensive=math.inf,
    half_flops=5e10,
    single_flops=5e10,
    bandwidth=1e10,
)
"""A host without a GPU, for the cpu lane."""

_RATIOS = {torch.bfloat16: 1.41, torch.float16: 1.12, torch.float32: 1.17, torch.bool: 8.0}
"""Compression ratio of `ancf` for dense saved values, by dtype."""


def machine_of(device: torch.device) -> Machine:
    """Return the figures for tensors on `device`."""
    return CUDA if device.type == "cuda" else CPU


def expected_ratio(dtype: torch.dtype, codec: str) -> float:
    """Return the expected compression ratio of `codec` for a dtype; 1.0 means no compression."""
    return 1.0 if codec == "raw" else _RATIOS.get(dtype, 1.0)
