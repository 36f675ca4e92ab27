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
    """Who keeps a storage in one attribute, and leaves that lie in it in another."""

    source: torch.UntypedStorage | None
    leaves: dict[int, torch.Tensor]


def is_unshared(holder: _Holder) -> bool:
    """Tell whether nothing but `holder` keeps the storage, nor a leaf that could be given other."""
    source = holder.source
    if source is None:
        return False
    for leaf in holder.leaves.values():
        if _leaf_references(leaf) != _UNSHARED_LEAF:
            return False
        if leaf.untyped_storage()._cdata != source._cdata:
            return False  # it was given other data, which its handles will find
    uses, references = _references(source)
    return (uses - len(holder.leaves), references) == _UNSHARED[bool(holder.leaves)]


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Tell whether the memory is not PyTorch's alone: NumPy's, DLPack's, another process's."""
    if not storage.resizable():  # what was only lent to PyTorch
        return True
    return storage.device.type == "cpu" and storage.is_shared()


def _references(source: torch.UntypedStorage) -> tuple[int, int]:
    return _use_count(source._cdata), sys.getrefcount(source)


def _leaf_references(leaf: torch.Tensor) -> tuple[int, int]:
    return leaf._use_count(), sys.getrefcount(leaf)  # type: ignore[attr-defined]  # torch's gap


class _Example:
    def __init__(self) -> None:
        tensor = torch.empty(1)
        self.source = tensor.untyped_storage()
        self.leaves = {0: tensor}


def _unshared() -> tuple[dict[bool, tuple[int, int]], tuple[int, int]]:
    """Return what is counted for a storage without and with leaves in it, and for a leaf."""
    example, found = _Example(), {}
    for leaf in example.leaves.values():
        leaf_references = _leaf_references(leaf)
    del leaf
    source = example.source
    uses, references = _references(source)
    found[True] = uses - 1, references
    example.leaves.clear()
    found[False] = _references(source)
    return found, leaf_references


_UNSHARED, _UNSHARED_LEAF = _unshared()
