"""Who else can reach a storage's memory: what may be snapshotted, and when.

PyTorch keeps a saved tensor's storage until the backward pass and reads what is in it by then. It
counts changes only where they go through one version counter: not those through `.data`, NumPy,
DLPack, a collective or a sibling of `unsafe_chunk`, nor those of an operation that fills what it
has saved. So bytes may be taken, and the storage given up, once nobody else holds it: whoever
holds no reference cannot write, and what nobody can write is what PyTorch would read later.

References are counted twice, by C++ (tensors) and by Python (the storage's own object). What both
count for a storage that is held by one attribute is found out once, since it differs among
versions of either.
"""

from __future__ import annotations

import sys
from typing import Protocol

import torch

__all__ = ["is_foreign", "is_unshared"]

_use_count = torch._C._storage_Use_Count


class _Holder(Protocol):
    """Who keeps a storage in one attribute, and nowhere else."""

    source: torch.UntypedStorage | None


def is_unshared(holder: _Holder) -> bool:
    """Tell whether nothing but `holder.source` keeps the storage."""
    return _references(holder) == _UNSHARED


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Tell whether the memory is not PyTorch's alone: NumPy's, DLPack's, another process's."""
    if not storage.resizable():  # what was only lent to PyTorch
        return True
    return storage.device.type == "cpu" and storage.is_shared()


def _references(holder: _Holder) -> tuple[int, int]:
    source = holder.source
    return (0, 0) if source is None else (_use_count(source._cdata), sys.getrefcount(source))


class _Example:
    def __init__(self) -> None:
        self.source: torch.UntypedStorage | None = torch.empty(1).untyped_storage()


_UNSHARED = _references(_Example())
