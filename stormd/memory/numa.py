"""Finds the NUMA node that a GPU is near, and makes this process's memory come from that node.

On a host with several sockets, a copy to a pool behind the other socket shares the link between the
sockets with all other traffic. If the kernel does not name a node, or a container does not allow
the preference, memory comes from wherever the kernel takes it: nothing fails.
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
"""The kernel's value for a device that is near no node, or on a machine with one node."""

MPOL_PREFERRED: Final = 1
"""Takes memory from that node while it has some, else from others: a full node ends no process."""

SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
"""The system call's number, by architecture."""

NODES_PART: Final = ctypes.sizeof(ctypes.c_ulong) * 8

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
NODES: Final = Path("/sys/devices/system/node")

_libc = ctypes.CDLL(None, use_errno=True)


def near_gpus(ordinals: Iterable[int], devices: Path = PCI_DEVICES) -> int:
    """Return the node that all these GPUs are near; NO_NODE if they differ or it is unknown."""
    found = {_node_of(ordinal, devices) for ordinal in ordinals}
    return found.pop() if len(found) == 1 else NO_NODE


def prefer_node(node: int) -> int:
    """Make memory that this thread, or a thread it starts, touches first come from a node.

    Returns the node; NO_NODE if there is none to prefer, or it may not be preferred. If the policy
    is refused, as in containers, the process is bound to the node's CPUs instead: the kernel then
    takes their memory by default.
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
    """Return a node's CPUs; empty if the node does not exist."""
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
