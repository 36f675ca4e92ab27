"""Gives device memory back when PyTorch runs out of it, before it says so to the script.

A mapping in the daemon keeps memory alive that the script has freed. Here sessions hear of the
error first and have such mappings undone. PyTorch has retried by then, so the allocation that
failed is not saved, but the script's own retry is.

PyTorch calls an observer for as long as the process lives and takes none back, so there is one
for all sessions, which it knows weakly.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch

from storm_client.transport.interrupts import Living

__all__ = ["watch"]

log = logging.getLogger(__name__)


class _Owner(Protocol):
    @property
    def device(self) -> torch.device: ...

    def give_back_memory(self) -> None: ...


_OWNERS: Living[_Owner] = Living()


def watch(owner: _Owner) -> None:
    """Call the owner's `give_back_memory` whenever its device's memory runs out."""
    _OWNERS.add(owner)
    _observe()


@cache
def _observe() -> None:
    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]  # only where torch has CUDA
    try:
        attach(_give_back)
    except RuntimeError as error:
        # The cudaMallocAsync backend has none. Its memory is never mapped by the daemon either.
        log.info("nothing is given back when memory runs out: %s", error)


def _give_back(device: int, wanted: int, allocated: int, free: int) -> None:  # noqa: ARG001 - PyTorch's signature
    for owner in _OWNERS:
        if owner.device.index == device:
            owner.give_back_memory()
