"""What a machine can do: the figures that every plan is made from, for hooks and graphs alike.

The planner compares three ways to have a saved tensor in the backward pass: keep it, offload and
restore it, or recompute it. All of what that comparison knows of the hardware stands here, so that
there is one place to measure it into. No figure decides what a tensor's bits are: a wrong one costs
time alone.
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
    """Seconds a byte on the link, one way, for what is not compressed."""
    codec: float
    """Seconds a byte that the processor that trains loses to encoding and decoding together."""
    hides: bool
    """Whether the link works while the device computes."""
    fetch_latency: float
    """Seconds of a fetch that are not the link's: the daemon looks for it, decodes and answers."""
    longest_beside: float
    """Seconds of one kernel through which the link has work: large products and attention leave
    the codec no room, and it gets in where one ends and the next begins."""

    # --- the training thread ---
    thread_store: float
    """Seconds for a tensor that hooks offload, both passes together; as measured, once it was."""
    graph_store: float
    """Seconds for a tensor that a compiled graph offloads, as far as nothing hides them."""
    thread_recompute: float
    """Seconds that recomputing one operation takes at the least."""

    # --- computing ---
    unmeasured: float
    """Seconds for a byte of the result of an operation whose time is not known."""
    unmeasured_expensive: float
    """The same of products and attention; infinity where only measured ones are recomputed."""
    half_flops: float
    """Floating-point operations a second in products of half precision."""
    single_flops: float
    """The same of single precision, rounded nowhere."""
    rounded_share: float
    """Of `half_flops`, what products of single precision reach that may be rounded (TF32)."""
    bandwidth: float
    """Bytes of memory traffic a second."""

    measured: frozenset[str] = frozenset()
    """Names of the figures that were measured here; the others are of the machine beside them."""

    def compressing(self, ratio: float) -> Machine:
        """Return the figures where what crosses the link is compressed by `ratio`."""
        return replace(self, link=self.link / ratio)

    def with_link(self, figures: LinkFigures) -> Machine:
        """Return the figures where a daemon's copies were timed, or are limited."""
        names = self.measured | {"link"} if figures.link else self.measured
        return replace(self, link=self.link_by(figures), measured=names)

    def with_thread_store(self, seconds: float | None) -> Machine:
        """Return the figures with what hooks were measured to take for a tensor; None: not yet."""
        if seconds is None:
            return self
        return replace(self, thread_store=seconds, measured=self.measured | {"thread"})

    def link_by(self, figures: LinkFigures) -> float:
        """Return `link` as a daemon says it: the slowest of what the bytes pass."""
        return max(figures.link or self.link, figures.limit, figures.disk)


class LinkFigures(NamedTuple):
    """What a daemon says of a device's link, in seconds a byte; 0.0 for what it does not know."""

    link: float = 0.0
    """Of what copies of late had of it, in the slower direction, whoever else copied."""
    limit: float = 0.0
    """What the daemon was told to take at the least."""
    disk: float = 0.0
    """For which its tier on disk is busy for each byte that comes to the pool, or leaves it. It
    moves them beside the link."""

    @classmethod
    def of(cls, speeds: Pong) -> LinkFigures:
        """Return what an answer to Ping says."""
        return cls(*(1 / one if one else 0.0 for one in (speeds.link, speeds.limit, speeds.disk)))


CUDA = Machine(
    # One H200 on PCIe 5: a pinned copy each way.
    link=1 / 55e9,
    # One H200: a kernel each way, which reads and writes once.
    codec=1.5e-12,
    hides=True,
    # One H200: chosen for compiled graphs, not measured by itself.
    fetch_latency=1e-3,
    # One H200: a session's scratch holds three of the largest chunks, which cross in that time.
    longest_beside=4e-3,
    # One H200, 16 Xeon cores, PyTorch 2.11. Counts until it was measured, as `unmeasured` does.
    thread_store=1.5e-4,
    # A compiled graph's thread runs ahead of the device, which hides most of `thread_store`.
    graph_store=2e-5,
    # Taken for the launch of a kernel from Python; not measured.
    thread_recompute=2.5e-5,
    # Taken for elementwise kernels, which read and write once; not measured.
    unmeasured=5e-13,
    unmeasured_expensive=math.inf,
    # One H200: large products, and several elementwise operations fused.
    half_flops=6.5e14,
    single_flops=5e13,
    rounded_share=0.5,
    bandwidth=3e12,
)
"""A data-centre GPU on PCIe 5."""

CPU = Machine(
    # Orders of magnitude: the cores that train also copy and encode, so nothing hides.
    link=1 / 1.5e9,
    codec=1 / 1.5e9,
    hides=False,
    fetch_latency=0.0,
    longest_beside=math.inf,
    thread_store=1.5e-4,
    graph_store=1.5e-4,
    thread_recompute=2e-5,
    # Orders of magnitude: what else runs on the cores would decide a measurement.
    unmeasured=1 / 5e9,
    unmeasured_expensive=math.inf,
    half_flops=5e10,
    single_flops=5e10,
    rounded_share=0.5,
    bandwidth=1e10,
)
"""A host without a GPU, for the cpu lane."""

_RATIOS = {torch.bfloat16: 1.41, torch.float16: 1.12, torch.float32: 1.17, torch.bool: 8.0}
"""By how much `ancf` compresses what models save; dense values of each dtype."""


def machine_of(device: torch.device) -> Machine:
    """Return the figures for tensors of `device`."""
    return CUDA if device.type == "cuda" else CPU


def expected_ratio(dtype: torch.dtype, codec: str) -> float:
    """Return by how much `codec` probably compresses values of a dtype; 1.0 is not at all."""
    return 1.0 if codec == "none" else _RATIOS.get(dtype, 1.0)
