"""What a machine can do: the figures that every plan is made from, for hooks and graphs alike.

The planner compares three ways to have a saved tensor in the backward pass: keep it, offload and
restore it, or recompute it. All of what that comparison knows of the hardware stands here, so that
there is one place to measure it into. No figure decides what a tensor's bits are: a wrong one costs
time alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

__all__ = ["CPU", "CUDA", "LinkFigures", "Machine", "expected_ratio", "machine_of"]

LEAST_COPIED: Final = 64 << 20
"""Bytes each way from which on a link is taken to be as fast as they were: small copies are not."""


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
    """Seconds for a tensor that hooks offload, both passes together."""
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
        measured = [one for one in (figures.store, figures.restore) if one > 0.0]
        link = max(measured, default=self.link) if self.hides else self.link
        names = self.measured | {"link"} if measured and self.hides else self.measured
        return replace(self, link=max(link, figures.limit, figures.disk), measured=names)


class LinkFigures(NamedTuple):
    """What a daemon says of a device's link, in seconds a byte; 0.0 for what it does not know."""

    store: float = 0.0
    """Of copies from the device to the pool, while they were under way."""
    restore: float = 0.0
    """The other way."""
    limit: float = 0.0
    """What the daemon was told to take at the least."""
    disk: float = 0.0
    """For which its tier on disk was busy for each byte stored, or restored where that was more:
    the disk's share of the bytes, at the disk's speed. It moves them beside the link."""

    @classmethod
    def of(cls, state: Mapping[str, Any], uuid: str) -> LinkFigures:
        """Read the object that Status carries, for the GPU of that UUID; of a CPU the limit."""
        most = state.get("link_limit_bytes", 0)
        limit, disk = 1 / most if most else 0.0, _disk_seconds_a_byte(state)
        for gpu in state["gpus"]:
            if uuid and gpu["uuid"] == uuid:
                ways = gpu["link"]
                store, restore = map(_seconds_a_byte, (ways["store"], ways["restore"]))
                return cls(store, restore, limit, disk)
        return cls(limit=limit, disk=disk)


def _disk_seconds_a_byte(state: Mapping[str, Any]) -> float:
    """Return the seconds of the disk for each byte that came to the pool or left it; 0.0 unused."""
    spill = state.get("spill")
    if spill is None or spill["ended"]:
        return 0.0
    return max(
        spill[one]["busy_seconds"] / state["throughput"][other]["blob_bytes"]
        if spill[one]["bytes"] >= LEAST_COPIED and state["throughput"][other]["blob_bytes"]
        else 0.0
        for one, other in (("write", "store"), ("read", "restore"))
    )


def _seconds_a_byte(way: Mapping[str, Any]) -> float:
    return float(way["busy_seconds"] / way["bytes"]) if way["bytes"] >= LEAST_COPIED else 0.0


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
    # One H200, 16 Xeon cores, PyTorch 2.11.
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
