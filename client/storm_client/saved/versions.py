"""What is noted of a saved tensor that leaves: how it lies in its storage, and at which version.

A **view** says how a tensor lies in its storage. The rest is PyTorch's check that a saved tensor
was not changed in place.

Hooks switch PyTorch's own check off, and a backward pass must not be handed a tensor that has
changed. So this is the same check, with the same message. What was given other data since
(`tensor.data = other`) is found with that data, as PyTorch finds it.

A token is an alias of the tensor whose data was replaced by nothing: it shares the version
counter and holds no storage.
"""

from __future__ import annotations

import re
import weakref
from typing import Any, NamedTuple

import torch

__all__ = ["KeptTensor", "SavedVersion", "View", "changed_in_place", "nothing"]

_SUFFIX = r"Backward\d*$" if torch.__version__ >= "2.12" else r"$^"
"""What PyTorch leaves out of an operation's name in its message: nothing in 2.11, this in 2.13."""

_NOTHING: dict[torch.device, torch.Tensor] = {}
"""An empty tensor a device: it becomes the data of every token there."""


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


class SavedVersion:
    """The version of a tensor at the time when it was saved."""

    __slots__ = ("dtype", "expected", "producer", "saved", "shape", "storage", "token")

    def __init__(self, token: torch.Tensor, tensor: torch.Tensor, storage: int) -> None:
        """Note the present version of `tensor`, whose version counter `token` shares.

        `storage` is the address of its storage, 0 where it has none.
        """
        node = tensor.grad_fn
        self.token = token
        self.expected = token._version
        self.shape = None if tensor.is_nested else tensor.shape
        """For the message; nested tensors have none."""
        self.dtype = tensor.dtype
        self.producer = None if node is None else (node.name(), tensor.output_nr)
        """Name of the operation and the number of its output, where the tensor has one."""
        self.saved = weakref.ref(tensor)
        """The tensor itself, which may be given other data while it lives."""
        self.storage = storage

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> SavedVersion:
        """Note the present version of `tensor`, in `storage`, without keeping its memory."""
        token = tensor.detach()
        token.data = nothing(tensor.device)
        return cls(token, tensor, storage)

    @classmethod
    def holding(cls, tensor: torch.Tensor) -> SavedVersion:
        """Note the present version of `tensor`, which has yet to become an output, or is none.

        The token is an alias that keeps its memory.
        """
        token = tensor.detach()
        return cls(token, tensor, _storage(token))

    @property
    def unchanged(self) -> bool:
        """Whether the tensor still has the version at which it was saved."""
        return self.token._version == self.expected

    def check(self) -> None:
        """Raise PyTorch's RuntimeError where the tensor has been changed in place since."""
        found = self.token._version
        if found != self.expected:
            like = torch.empty(0, dtype=self.dtype, device=self.token.device)
            producer, output = self.producer or ("", 0)
            raise changed_in_place(like, self.shape, producer, output, self.expected, found)

    def replaced(self) -> torch.Tensor | None:
        """Return the tensor if it has been given other data since, where PyTorch would use those.

        It would not for an operation's own output, which it holds as it was.
        """
        tensor = self.saved()
        if tensor is None or not self.storage:
            return None
        tensor._fix_weakref()  # type: ignore[attr-defined]  # what C++ alone holds comes back
        if _storage(tensor) == self.storage:
            return None
        maker = tensor.grad_fn
        is_own_output = maker is not None and maker is torch._C._current_autograd_node()
        return None if is_own_output else tensor

    def alias(self, data: torch.Tensor) -> torch.Tensor:
        """Return a tensor with `data`'s content that counts its changes with the saved one's.

        A backward pass that changes what it unpacked is thus noticed by whoever unpacks next.
        """
        tensor = self.token.detach()
        tensor.data = data
        return tensor


class KeptTensor(SavedVersion):
    """What autograd holds for a tensor that is not offloaded: its token keeps the memory."""

    __slots__ = ("__weakref__", "is_alias", "moved")
    is_alias: bool
    """Whether the token is an alias, which may be moved."""
    moved: Any
    """What its step is to unpack instead, once the token keeps nothing."""

    @classmethod
    def keeping(cls, tensor: torch.Tensor) -> KeptTensor:
        """Keep `tensor` and its present version.

        What no operation made is its own token, as it is what PyTorch would hold. An output must
        not be: it would hold itself, by way of the operation that it keeps alive, and never be
        freed.
        """
        is_alias = tensor.grad_fn is not None
        token = tensor.detach() if is_alias else tensor
        kept = cls(token, tensor, _storage(token))
        kept.is_alias, kept.moved = is_alias, None
        return kept

    def move(self, moved: Any) -> None:
        """Let the tensor go: what unpacks `moved` has the bytes from now on.

        A thread that looks at the token before it looks at `moved` finds one or the other.
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
    """Return PyTorch's error for a saved tensor of `like`'s dtype and device that has changed.

    A nested tensor's `shape` is None. `producer` is the name of the operation whose `output` it is,
    empty where there is none.
    """
    told = "" if shape is None else f" {list(shape)}"
    made = f", which is output {output} of {re.sub(_SUFFIX, '', producer)}," if producer else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{like.type()}{told}]{made} is at version {found}; expected "
        f"version {expected} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, 0 where it may have none."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    return 0 if tensor._is_zerotensor() else tensor.untyped_storage()._cdata


def nothing(device: torch.device) -> torch.Tensor:
    """Return the empty tensor that becomes the data of every token on a device."""
    empty = _NOTHING.get(device)
    if empty is None:
        empty = _NOTHING[device] = torch.empty(0, device=device)
    return empty
