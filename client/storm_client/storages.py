"""How tensors lie in storages, and what is known of storages that others keep.

A **view** says how a tensor lies in its storage.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch

__all__ = [
    "Located",
    "Pins",
    "Ready",
    "ReadyTrial",
    "SnapshotProof",
    "Unchanging",
    "View",
    "WeakStorage",
    "base_of",
    "is_result",
]


class View(NamedTuple):
    """How a tensor lies in its storage; `offset` counts bytes from the storage's start."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Describe a strided tensor."""
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()) * tensor.element_size(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def span(self) -> tuple[int, int]:
        """Return the first byte that the view touches and the one after the last."""
        if 0 in self.size:
            return self.offset, self.offset
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + (reach + 1) * self.dtype.itemsize

    def describes(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in its storage like this."""
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() * self.dtype.itemsize == self.offset
            and tensor.is_conj() is self.conjugated
            and tensor.is_neg() is self.negated
        )

    def rebuild(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor over a storage that holds the bytes again."""
        offset = self.offset // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, offset, self.size, self.stride)
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor


class WeakStorage:
    """Knows a storage without keeping it, and keeps its address from being used for another one.

    PyTorch's own StorageWeakRef has a destructor in Python, in which an interrupt would be lost:
    this one has to be freed.
    """

    __slots__ = ("_pointer", "address")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address = storage._cdata
        self._pointer = storage._weak_ref()

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage if something else still keeps it; not after `free`."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._pointer)
        return found

    def free(self) -> None:
        """Give the address up; once."""
        torch.UntypedStorage._free_weak_ref(self._pointer)  # type: ignore[no-untyped-call]


class Pins:
    """Storages that are known weakly for as long as somebody holds this.

    Whoever drops it last may be any thread, where a signal may strike: they are freed by one who
    finds it dead, from the list, which outlives it.
    """

    __slots__ = ("__weakref__", "storages")

    def __init__(self) -> None:
        self.storages: list[WeakStorage] = []

    def add(self, storage: torch.UntypedStorage) -> WeakStorage:
        """Know one more."""
        pin = WeakStorage(storage)
        self.storages.append(pin)
        return pin


class Located(NamedTuple):
    """Where a record's bytes are in memory: its own storage, or one of the same size."""

    storage: torch.UntypedStorage
    is_original: bool = False
    """Whether nothing was copied: who made the bytes is as far ahead as without offload."""


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

    def compare(self, storage: torch.UntypedStorage) -> None:
        """Note whether what has left, or would have, is what was made."""
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
    """Tell whether an operation made the tensor's memory: then its changes are counted."""
    return base_of(tensor).grad_fn is not None


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which `tensor` is a view, or itself."""
    base = tensor._base
    return tensor if base is None else base


def _covers(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
