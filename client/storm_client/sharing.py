"""Who else can reach a storage's memory, which decides when its bytes may be taken.

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

from sys import getrefcount
from typing import Protocol

import torch

__all__ = ["is_foreign", "is_unshared"]

_use_count = torch._C._storage_Use_Count


class _Holder(Protocol):
    """Who keeps a storage in one attribute, and leaves that lie in it in another."""

    source: torch.UntypedStorage | None
    leaves: dict[int, torch.Tensor]


def is_unshared(holder: _Holder) -> bool:
    """Tell whether nothing but `holder` keeps the storage, nor a leaf that could be given other."""
    if holder.source is None:
        return False
    leaves, address = holder.leaves, holder.source._cdata
    for key in leaves:
        if (leaves[key]._use_count(), getrefcount(leaves[key])) != _UNSHARED_LEAF:  # type: ignore[attr-defined]  # torch's gap
            return False
        if leaves[key].untyped_storage()._cdata != address:
            return False  # it was given other data, which its handles will find
    counted = _use_count(address) - len(leaves), getrefcount(holder.source)
    return counted == _UNSHARED[bool(leaves)]


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Tell whether the memory is not PyTorch's alone: NumPy's, DLPack's, another process's."""
    if not storage.resizable():  # what was only lent to PyTorch
        return True
    return storage.is_shared() and storage.device.type == "cpu"  # memory of a GPU counts as shared


class _Example:
    def __init__(self) -> None:
        tensor = torch.empty(1)
        self.source = tensor.untyped_storage()
        self.leaves = {0: tensor}


def _unshared() -> tuple[dict[bool, tuple[int, int]], tuple[int, int]]:
    """Return what is counted for a storage without and with leaves in it, and for a leaf.

    Python's count is taken of what was just looked up, never of a variable: whether an argument is
    counted once or twice depends on who evaluates the frame, which torch.compile changes.
    """
    example = _Example()
    address, leaves = example.source._cdata, example.leaves
    leaf = leaves[0]._use_count(), getrefcount(leaves[0])  # type: ignore[attr-defined]
    found = {True: (_use_count(address) - 1, getrefcount(example.source))}
    leaves.clear()
    found[False] = _use_count(address), getrefcount(example.source)
    return found, leaf


_UNSHARED, _UNSHARED_LEAF = _unshared()
