"""Which node of memory a GPU is near, and having this process's memory come from there.

On a host of several sockets a copy to a pool behind the other socket shares the link between them
with everybody else's. Where the kernel does not say, or a container does not allow it, memory comes
from wherever the kernel takes it: nothing fails.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["NO_NODE", "near_gpus", "nodes_cpus", "prefer_node"]

log = logging.getLogger(__name__)

NO_NODE: Final = -1
"""As the kernel says of a device that is near no node, or of a machine with one."""

MPOL_PREFERRED: Final = 1
"""From that node while it has memory, else from others: a full node ends no process."""

SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
"""The system call's number."""

NODES_PART: Final = ctypes.sizeof(ctypes.c_ulong) * 8

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
NODES: Final = Path("/sys/devices/system/node")

_libc = ctypes.CDLL(None, use_errno=True)


def near_gpus(ordinals: Iterable[int], devices: Path = PCI_DEVICES) -> int:
    """Return the node that all these GPUs are near; NO_NODE where they differ or none is known."""
    found = {_node_of(ordinal, devices) for ordinal in ordinals}
    return found.pop() if len(found) == 1 else NO_NODE


def prefer_node(node: int) -> int:
    """Have memory that this thread and those it starts touch first come from a node.

    Returns the node; NO_NODE where there is none to prefer, or it may not be preferred. Where the
    policy is refused, as in containers, the process stays on the node's processors instead, from
    whose memory the kernel takes by itself.
    """
    if node < 0 or len(list(NODES.glob("node[0-9]*"))) < 2:
        return NO_NODE
    number = SET_MEMPOLICY.get(platform.machine())
    mask = (ctypes.c_ulong * (node // NODES_PART + 1))()
    mask[node // NODES_PART] = 1 << node % NODES_PART
    bits = ctypes.c_ulong(len(mask) * NODES_PART + 1)
    if number and _libc.syscall(ctypes.c_long(number), MPOL_PREFERRED, mask, bits) == 0:
        return node
    cpus = nodes_cpus(node) & os.sched_getaffinity(0)
    if not cpus:
        log.warning("memory of node %d cannot be preferred: allow set_mempolicy", node)
        return NO_NODE
    os.sched_setaffinity(0, cpus)
    return node


def nodes_cpus(node: int, nodes: Path = NODES) -> set[int]:
    """Return a node's processors; empty where it is not there."""
    try:
        text = (nodes / f"node{node}" / "cpulist").read_text()
    except OSError:
        return set()
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _node_of(ordinal: int, devices: Path) -> int:
    from storm_kernels.errors import BackendUnavailable, CudaDriverError

    try:
        # Not at the top: without CUDA its libraries stay unloaded.
        from storm_kernels.cuda_driver import pci_bus_id

        return int((devices / pci_bus_id(ordinal) / "numa_node").read_text())
    except (BackendUnavailable, CudaDriverError, OSError, ValueError):
        return NO_NODE
