"""Makes room on a device whose memory has run out, so that a step's allocation does not fail.

Compiled code repeats a failed allocation (`native/allocations.cpp`) as long as room is made here,
in stages of increasing cost. If nothing helps, the script gets PyTorch's own error, with a line
that says what held the memory.

Without compiled code only PyTorch's observer learns of the failure. The allocation fails, but
mappings that keep freed memory alive are undone before the script gets the error. PyTorch keeps an
observer for the life of the process. So there is one observer for all sessions, which it knows
weakly.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from storm_client.native import loader
from storm_client.planner.shortage import record_shortage
from storm_client.transport.interrupts import SafeWeakSet
from storm_client.transport.kept_memory import kept_bytes
from stormd.protocol.sizes import format_size

if TYPE_CHECKING:
    from storm_client.native import Native
    from storm_client.transport.device_memory import DeviceMemory

__all__ = ["MayFail", "make_room", "retry_allocations", "watch"]

log = logging.getLogger(__name__)


_OWNERS: Final[SafeWeakSet[DeviceMemory]] = SafeWeakSet()


class _Thread(threading.local):
    """Whether allocations of this thread may fail without harm."""

    may_fail = False


_thread = _Thread()


def watch(owner: DeviceMemory) -> None:
    """Call the owner whenever its device's memory runs out."""
    _OWNERS.add(owner)
    _observe()
    retry_allocations()


class MayFail:
    """A context for allocations that may fail: no room is made for them."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        """Make no room from now on."""
        self._before, _thread.may_fail = _thread.may_fail, True

    def __exit__(self, *error: object) -> None:
        """Restore the state before."""
        _thread.may_fail = self._before


@cache
def _observe() -> None:
    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]  # only where torch has CUDA
    try:
        attach(_on_out_of_memory)
    except RuntimeError as error:
        # The cudaMallocAsync backend has no observer, and the daemon never maps its memory.
        log.info("nothing is given back when memory runs out: %s", error)


def retry_allocations() -> None:
    """Have compiled code repeat failed allocations, once it is built."""
    module = loader.module()
    if module is not None:
        _retry(module)


@cache
def _retry(module: Native) -> None:
    try:
        is_watched = module.watch_allocations("cuda", _on_failed_allocation)
    except RuntimeError as error:  # as where torch has no CUDA
        log.info("allocations that fail are not tried again: %s", error)
        return
    if not is_watched:
        log.info("allocations that fail are not tried again: the allocator cannot be watched")


def _on_out_of_memory(device: int, wanted: int, allocated: int, free: int) -> None:  # noqa: ARG001 - PyTorch's signature
    for owner in _owners(device):
        owner.unmap_freed_memory()


def _owners(ordinal: int) -> list[DeviceMemory]:
    return [owner for owner in _OWNERS if owner.device.index == ordinal]


def _on_failed_allocation(nbytes: int, attempt: int) -> bool | str:
    """Make room for a failed allocation; return whether to try again, or the message to show."""
    if _thread.may_fail:
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    return make_room(device, nbytes, attempt)


def make_room(device: torch.device, nbytes: int, attempt: int) -> bool | str:
    """Make room on a device, in a costlier way with each attempt, or return what held its memory.

    Args:
        device: with its index.
        nbytes: the size of the failed allocation.
        attempt: how many times room was made for it already.
    """
    owners = _owners(device.index)
    if not owners:
        return False
    if attempt == 0:
        for owner in owners:
            owner.make_room()
        return True
    if attempt == 1:
        record_shortage(device, nbytes)
    moved = sum(owner.offload_kept() for owner in owners) if attempt == 1 else 0
    if moved:
        for owner in owners:
            owner.make_room()
        return True
    return _line(device, nbytes)


def _line(device: torch.device, nbytes: int) -> str:
    """Return a line about what holds a device's memory after all possible offloads."""
    free, total = torch.cuda.mem_get_info(device)
    others = max(0, total - free - torch.cuda.memory_reserved(device))
    kept, used = kept_bytes(device), torch.cuda.memory_allocated(device)
    said = (
        f"stormd: everything that can be offloaded from {device} has been offloaded: of "
        f"{format_size(used)} in use {format_size(used - kept)} are parameters, gradients, "
        f"optimizer states and what operations work on, {format_size(kept)} saved tensors that the "
        f"script holds or the daemon did not take; {format_size(others)} are other processes'"
    )
    if kept >= nbytes:
        return f"{said}; `stormd status` says what the pool has room for"
    return f"{said}; no budget fits this step: take a smaller batch, or name layers="
