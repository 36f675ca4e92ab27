"""What is known of a storage that somebody else may hold: who can reach it, and whether it changed.

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

import weakref
from sys import getrefcount
from typing import NamedTuple, Protocol

import torch

from storm_client.saved.versions import View

__all__ = [
    "Ready",
    "ReadyTrial",
    "SnapshotProof",
    "Unchanging",
    "base_of",
    "is_result",
    "is_unshared",
]

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


class SnapshotProof:
    """What shows that a storage somebody else holds still has the bytes that were sent.

    All views of a result count their changes in its one version counter.
    """

    __slots__ = ("_base", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Note the present version of `tensor`, a result or a view of one."""
        base = base_of(tensor)
        self._base = weakref.ref(base)
        self._version = base._version

    @classmethod
    def of_base(cls, base: torch.Tensor, version: int) -> SnapshotProof:
        """Note the version that `base`, a result that is no view, had when it was saved."""
        proof = cls.__new__(cls)
        proof._base, proof._version = weakref.ref(base), version
        return proof

    def holds_for(self, tensor: torch.Tensor) -> bool:
        """Tell whether nothing that `tensor` covers has changed since."""
        base = self._base()
        return (
            base is not None
            and base_of(tensor) is base
            and base._version == self._version
            and _covers(View.of(base).span(), View.of(tensor).span())
        )


class ReadyTrial(Protocol):
    """Finds out whether a value stays as it was made until it leaves."""

    @property
    def signature(self) -> object:
        """The step signature whose value it is."""
        ...

    def is_same(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether what has left, or would have, is what was made."""
        ...

    def succeed(self) -> None:
        """Note that it does."""
        ...

    def fail(self) -> None:
        """Note that it does not."""
        ...


class Ready(NamedTuple):
    """A storage as it was right behind the function that made it, when `proof` was made.

    Who reads it from then on, and not only when it leaves, reads the same: shown by an earlier
    step, which is what `trial` is for, and as far as changes are counted by the proof.
    """

    proof: SnapshotProof
    sequence: int
    """What the lane publishes when it has been made; 0 where there is a trial."""
    trial: ReadyTrial | None = None

    def holds_for(self, tensor: torch.Tensor) -> bool:
        """Tell whether it has what is saved as `tensor`; else a trial has failed."""
        if self.proof.holds_for(tensor):
            return True
        if self.trial is not None:
            self.trial.fail()
        return False


class Unchanging(SnapshotProof):
    """Of a value inside a compiled graph, whose memory nothing writes to while it exists."""

    __slots__ = ()

    def holds_for(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - of none of its views
        """Tell that nothing has changed."""
        return True


def is_result(tensor: torch.Tensor) -> bool:
    """Tell whether an operation made the tensor's memory: then its changes are counted.

    A custom function may return a view of what it has made: that has a node, and its base has none.
    """
    base = tensor._base
    if base is None:
        return not tensor.is_leaf
    return not base.is_leaf or (tensor.grad_fn is not None and not base.requires_grad)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which `tensor` is a view, or itself."""
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
