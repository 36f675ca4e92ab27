"""Performance figures of a machine. Every plan, of hooks and of graphs, is based on them.

The planner compares three ways to provide a saved tensor in the backward pass: keep it, offload and
restore it, or recompute it. All hardware figures of that comparison are in this file, so that there
is one place to enter measurements. No figure affects the bits of a tensor: a wrong one costs only
time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from stormd.protocol import Pong

__all__ = ["CPU", "CUDA", "LinkFigures", "Machine", "expected_ratio", "machine_of"]


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
    longest_beside: float
    """Longest kernel, in seconds, during which the link still has data to transfer. Large products
    and attention occupy the device fully, so the codec's kernels run only between two of them."""

    # --- the training thread ---
    thread_store: float
    """Seconds to offload one tensor by hooks, both passes together; the measured time once
    known."""
    graph_store: float
    """Seconds to offload one tensor by a compiled graph, as far as nothing hides them."""
    thread_recompute: float
    """Least seconds for recomputing one operation."""

    # --- computing ---
    unmeasured: float
    """Seconds per byte of the result, for an operation that was not measured."""
    unmeasured_expensive: float
    """The same for products and attention; infinity if only measured ones are recomputed."""
    half_flops: float
    """Floating-point operations a second in half-precision products."""
    single_flops: float
    """The same in single-precision products without rounding."""
    rounded_share: float
    """Share of `half_flops` that single-precision products reach if rounding (TF32) is allowed."""
    bandwidth: float
    """Bytes of memory traffic a second."""

    measured: frozenset[str] = frozenset()
    """Names of the figures that were measured on this machine; the others are defaults."""

    def compressing(self, ratio: float) -> Machine:
        """Return the figures for data that is compressed by `ratio` on the link."""
        return replace(self, link=self.link / ratio)

    def with_link(self, figures: LinkFigures) -> Machine:
        """Return the figures with the link time that the daemon measured or limits."""
        names = self.measured | {"link"} if figures.link else self.measured
        return replace(self, link=self.link_by(figures), measured=names)

    def with_thread_store(self, seconds: float | None) -> Machine:
        """Return the figures with the measured hook time per tensor; None: not measured yet."""
        if seconds is None:
            return self
        return replace(self, thread_store=seconds, measured=self.measured | {"thread"})

    def link_by(self, figures: LinkFigures) -> float:
        """Return seconds per byte on the link: the slowest of copies, limit and disk."""
        return max(figures.link or self.link, figures.limit, figures.disk)


class LinkFigures(NamedTuple):
    """A device's link as the daemon reports it, in seconds a byte; 0.0 if not known."""

    link: float = 0.0
    """Speed of the session's latest copies in the slower direction, while others may have
    copied."""
    limit: float = 0.0
    """Least time that the daemon's settings allow."""
    disk: float = 0.0
    """Busy time of the daemon's disk tier for each byte that enters or leaves the pool. The disk
    transfers overlap with the link."""

    @classmethod
    def of(cls, speeds: Pong) -> LinkFigures:
        """Return the figures that an answer to Ping reports."""
        return cls(*(1 / one if one else 0.0 for one in (speeds.link, speeds.limit, speeds.disk)))


CUDA = Machine(
    # One H200 on PCIe 5: a pinned copy each way.
    link=1 / 55e9,
    # One H200: a kernel each way, which reads and writes once.
    codec=1.5e-12,
    hides=True,
    # One H200: chosen for compiled graphs, not measured by itself.
    fetch_latency=1e-3,
    # One H200: a session's scratch holds three of the largest chunks; the link needs 4 ms for them.
    longest_beside=4e-3,
    # One H200, 16 Xeon cores, PyTorch 2.11. Used until it is measured, as `unmeasured` is.
    thread_store=1.5e-4,
    # A compiled graph's thread runs ahead of the device, which hides most of `thread_store`.
    graph_store=2e-5,
    # Assumed: the launch of a kernel from Python; not measured.
    thread_recompute=2.5e-5,
    # Assumed: elementwise kernels, which read and write once; not measured.
    unmeasured=5e-13,
    unmeasured_expensive=math.inf,
    # One H200: large products, and several fused elementwise operations.
    half_flops=6.5e14,
    single_flops=5e13,
    rounded_share=0.5,
    bandwidth=3e12,
)
"""A data-centre GPU on PCIe 5."""

CPU = Machine(
    # Orders of magnitude: the training cores also copy and encode, so nothing overlaps.
    link=1 / 1.5e9,
    codec=1 / 1.5e9,
    hides=False,
    fetch_latency=0.0,
    longest_beside=math.inf,
    thread_store=1.5e-4,
    graph_store=1.5e-4,
    thread_recompute=2e-5,
    # Orders of magnitude: other work on the cores would dominate a measurement.
    unmeasured=1 / 5e9,
    unmeasured_expensive=math.inf,
    half_flops=5e10,
    single_flops=5e10,
    rounded_share=0.5,
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
    return 1.0 if codec == "none" else _RATIOS.get(dtype, 1.0)
