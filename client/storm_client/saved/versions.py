"""The view and the version of a saved tensor, as noted when it is saved.

A **view** says how a tensor lies in its storage. A version belongs to PyTorch's check that a saved
tensor was not modified in place.

Hooks switch PyTorch's own check off, and a backward pass must not get a modified tensor. So this
module makes the same check, with the same message. A tensor that has been given other data since
(`tensor.data = other`) is returned with that data, as PyTorch does.

A token is an alias of the tensor with its data replaced by an empty tensor: it shares the version
counter and holds no storage.
"""

from __future__ import annotations

import re
import weakref
from typing import Any, NamedTuple

import torch

__all__ = ["KeptTensor", "SavedVersion", "View", "changed_in_place", "nothing"]

_SUFFIX = r"Backward\d*$" if torch.__version__ >= "2.12" else r"$^"
"""The part of an operation's name that PyTorch's message omits: nothing in 2.11, this in 2.13."""

_UNTRACED = (
    "enable anomaly detection to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True, check_nan=False)."
)
"""The error's hint, as in PyTorch 2.13."""

_TRACED = (
    "the backtrace further above shows the operation that failed to compute its gradient. The "
    "variable in question was changed in there or anywhere later. Good luck!"
)
"""The error's hint while anomaly detection is enabled."""

_NOTHING: dict[torch.device, torch.Tensor] = {}
"""An empty tensor per device: it becomes the data of every token there."""


class View(NamedTuple):
    """How a tensor lies in its storage; `offset` is in bytes from the storage's start."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Return the view of a strided tensor."""
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()) * tensor.element_size(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def span(self) -> tuple[int, int]:
        """Return the first byte that the view covers, and the one after the last."""
        if 0 in self.size:
            return self.offset, self.offset
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + (reach + 1) * self.dtype.itemsize

    def describes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in its storage as this view says."""
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() * self.dtype.itemsize == self.offset
            and tensor.is_conj() is self.conjugated
            and tensor.is_neg() is self.negated
        )

    def rebuild(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor as a view of a storage that holds the restored bytes."""
        offset = self.offset // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, offset, self.size, self.stride)
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor


class SavedVersion:
    """A tensor's version when it was saved."""

    __slots__ = ("dtype", "expected", "producer", "saved", "shape", "storage", "token")

    def __init__(self, token: torch.Tensor, tensor: torch.Tensor, storage: int) -> None:
        """Note the present version of `tensor`, whose version counter `token` shares.

        `storage` is the address of the tensor's storage, 0 if it has none.
        """
        node = tensor.grad_fn
        self.token = token
        self.expected = token._version
        self.shape = None if tensor.is_nested else tensor.shape
        """For the error message; None for nested tensors."""
        self.dtype = tensor.dtype
        self.producer = None if node is None else (node.name(), tensor.output_nr)
        """The operation's name and its output's number, if an operation made the tensor."""
        self.saved = weakref.ref(tensor)
        """The tensor itself, which may get other data (`tensor.data = other`) while it lives."""
        self.storage = storage

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> SavedVersion:
        """Note the present version of `tensor`, in `storage`, without keeping its memory alive."""
        token = tensor.detach()
        token.data = nothing(tensor.device)
        return cls(token, tensor, storage)

    @classmethod
    def holding(cls, tensor: torch.Tensor) -> SavedVersion:
        """Note the present version of `tensor`, which is not an operation's output, or not yet.

        The token is an alias that keeps the tensor's memory alive.
        """
        token = tensor.detach()
        return cls(token, tensor, _storage(token))

    @property
    def version(self) -> SavedVersion:
        """Itself: what autograd holds either has a version or is one."""
        return self

    @property
    def unchanged(self) -> bool:
        """Whether the tensor still has the version at which it was saved."""
        return self.token._version == self.expected

    def check(self) -> None:
        """Raise PyTorch's RuntimeError if the tensor has been modified in place since the save."""
        found = self.token._version
        if found != self.expected:
            like = torch.empty(0, dtype=self.dtype, device=self.token.device)
            producer, output = self.producer or ("", 0)
            raise changed_in_place(like, self.shape, producer, output, self.expected, found)

    def replaced(self) -> torch.Tensor | None:
        """Return the tensor if it has got other data since the save, and if PyTorch would use them.

        For an operation's own output PyTorch would not: the operation holds the output's old data.
        """
        tensor = self.saved()
        if tensor is None or not self.storage:
            return None
        tensor._fix_weakref()  # type: ignore[attr-defined]  # revives one that C++ alone holds
        if _storage(tensor) == self.storage:
            return None
        maker = tensor.grad_fn
        is_own_output = maker is not None and maker is torch._C._current_autograd_node()
        return None if is_own_output else tensor

    def alias(self, data: torch.Tensor) -> torch.Tensor:
        """Return a tensor with `data`'s content and the saved tensor's version counter.

        If a backward pass modifies an unpacked tensor, the next unpack therefore notices it.
        """
        tensor = self.token.detach()
        tensor.data = data
        return tensor


class KeptTensor(SavedVersion):
    """Autograd's object for a tensor that is not offloaded: its token keeps the memory alive."""

    __slots__ = ("__weakref__", "is_alias", "moved")
    is_alias: bool
    """Whether the token is an alias, which may be moved."""
    moved: Any
    """What the step unpacks instead, once the tensor was moved and the token is empty."""

    @classmethod
    def keeping(cls, tensor: torch.Tensor) -> KeptTensor:
        """Keep `tensor` and its present version.

        A tensor that no operation made is its own token, as PyTorch would hold the tensor itself.
        An output must not be its own token. It would hold itself through the operation that it
        keeps alive, and would never be freed.
        """
        is_alias = tensor.grad_fn is not None
        token = tensor.detach() if is_alias else tensor
        kept = cls(token, tensor, _storage(token))
        kept.is_alias, kept.moved = is_alias, None
        return kept

    def move(self, moved: Any) -> None:
        """Give up the tensor's memory; `moved` unpacks to the same bytes from now on.

        A thread that reads the token first and `moved` second finds one of the two.
        """
        token = self.token.detach()
        token.data = nothing(token.device)
        self.moved = moved
        self.token = token


def changed_in_place(  # noqa: PLR0917 - called by compiled code, by place
    like: torch.Tensor,
    shape: tuple[int, ...] | None,
    producer: str,
    output: int,
    expected: int,
    found: int,
) -> RuntimeError:
    """Return PyTorch's error for a modified saved tensor, with `like`'s dtype and device.

    `shape` is None for a nested tensor. `producer` names the operation that made the tensor as
    output `output`; it is empty if no operation did.
    """
    told = "" if shape is None else f" {list(shape)}"
    made = f", which is output {output} of {re.sub(_SUFFIX, '', producer)}," if producer else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{like.type()}{told}]{made} is at version {found}; expected "
        f"version {expected} instead. Hint: {_TRACED if torch.is_anomaly_enabled() else _UNTRACED}"
    )


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, 0 if it may have none."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    return 0 if tensor._is_zerotensor() else tensor.untyped_storage()._cdata


def nothing(device: torch.device) -> torch.Tensor:
    """Return the empty tensor that becomes the data of every token on a device."""
    empty = _NOTHING.get(device)
    if empty is None:
        empty = _NOTHING[device] = torch.empty(0, device=device)
    return empty
