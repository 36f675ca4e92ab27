"""Checks whether others can reach a saved tensor's storage, and whether its bytes have changed.

PyTorch keeps a saved tensor's storage until the backward pass, and reads its bytes only then. It
counts a change only if the change goes through the tensor's version counter. Changes through
`.data`, NumPy, DLPack, a collective or a sibling of `unsafe_chunk` are not counted; neither are
writes of an operation that fills a tensor after saving it. So the bytes may be taken, and the
storage freed, once nobody else holds the storage. Without a reference nobody can write, so the
bytes are the ones that PyTorch would read later.

References are counted twice: by C++ (tensors) and by Python (the storage's own object). The counts
of a storage that one attribute holds are measured once, since they differ among versions of Python
and PyTorch.
"""

from __future__ import annotations

import weakref
from sys import getrefcount
from typing import Protocol

import torch

from storm_client.saved.versions import View

__all__ = [
    "SnapshotProof",
    "Unchanging",
    "base_of",
    "is_result",
    "is_unshared",
    "maker_of",
]

_use_count = torch._C._storage_Use_Count


class Holding(Protocol):
    """What holds a storage, and the saved tensors in it that no operation made."""

    source: torch.UntypedStorage | None
    leaves: dict[int, torch.Tensor]


def is_unshared(holder: Holding) -> bool:
    """Return whether only `holder` holds the storage and its leaves; no leaf has other data."""
    if holder.source is None:
        return False
    leaves, address = holder.leaves, holder.source._cdata
    for key in leaves:
        if (leaves[key]._use_count(), getrefcount(leaves[key])) != _UNSHARED_LEAF:  # type: ignore[attr-defined]  # torch's gap
            return False
        if leaves[key].untyped_storage()._cdata != address:
            return False  # the leaf has got other data, which its handles will return
    counted = _use_count(address) - len(leaves), getrefcount(holder.source)
    return counted == _UNSHARED[bool(leaves)]


class SnapshotProof:
    """Proves that a storage still has the bytes that were sent, though somebody else holds it.

    All views of a result count their changes in the result's one version counter.
    """

    __slots__ = ("_base", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Note the present version of `tensor`, which is a result or a view of one."""
        base = base_of(tensor)
        self._base = weakref.ref(base)
        self._version = base._version

    @classmethod
    def of_base(cls, base: torch.Tensor, version: int) -> SnapshotProof:
        """Note the version that `base`, a result that is not a view, had when it was saved."""
        proof = cls.__new__(cls)
        proof._base, proof._version = weakref.ref(base), version
        return proof

    def holds_for(self, tensor: torch.Tensor) -> bool:
        """Return whether no byte of `tensor` has changed since."""
        base = self._base()
        return (
            base is not None
            and base_of(tensor) is base
            and base._version == self._version
            and _covers(View.of(base).span(), View.of(tensor).span())
        )


class Unchanging(SnapshotProof):
    """The proof for a value inside a compiled graph: nothing writes to its memory."""

    __slots__ = ()

    def holds_for(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - of none of its views
        """Return True: nothing has changed."""
        return True


def maker_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the operation that made the tensor's memory, or changed it last.

    A custom function may return a view of memory that it has made itself. Such a view has a
    grad_fn, and its base has none. The grad_fn of other views is not read: PyTorch raises there if
    a view that was made with gradients off has been changed.
    """
    base = tensor._base
    made = tensor if base is None or not base.requires_grad else base
    return made.grad_fn


def is_result(tensor: torch.Tensor) -> bool:
    """Return whether an operation made the tensor's memory: then its changes are counted."""
    return maker_of(tensor) is not None


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, or the tensor itself."""
    base = tensor._base
    return tensor if base is None else base


def _covers(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


class _Example:
    def __init__(self) -> None:
        tensor = torch.empty(1)
        self.source = tensor.untyped_storage()
        self.leaves = {0: tensor}


def _unshared() -> tuple[dict[bool, tuple[int, int]], tuple[int, int]]:
    """Return the reference counts of a storage with and without leaves in it, and of a leaf.

    Python's count is taken of a fresh attribute look-up, never of a variable. Whether an argument
    counts once or twice depends on the frame evaluator, which torch.compile replaces.
    """
    example = _Example()
    address, leaves = example.source._cdata, example.leaves
    leaf = leaves[0]._use_count(), getrefcount(leaves[0])  # type: ignore[attr-defined]
    found = {True: (_use_count(address) - 1, getrefcount(example.source))}
    leaves.clear()
    found[False] = _use_count(address), getrefcount(example.source)
    return found, leaf


_UNSHARED, _UNSHARED_LEAF = _unshared()
