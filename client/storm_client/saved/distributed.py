"""Saves a DTensor as the local tensor that it wraps; the local tensor is handled as any other.

A DTensor has no memory of its own, but it has a version. Operations on it run on local tensors,
below the layer that counts their changes. So the backward pass compares the DTensor's version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from storm_client.saved.snapshots import base_of
from storm_client.saved.versions import SavedVersion, nothing

__all__ = ["Distributed", "local_of", "nbytes_of", "part_of"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the local tensor of a DTensor; None for other tensors and for DTensors to be kept.

    Kept are parameters, other leaves that require gradients, and DTensors that were modified in
    place. In the last case the local tensor still has the old version, and could be mistaken for a
    duplicate of an earlier save.
    """
    if type(tensor) in _PLAIN or not _is_distributed(tensor):
        return None
    base: Any = base_of(tensor)
    if base._version or isinstance(base, torch.nn.Parameter) or _is_wanted_leaf(base):
        return None
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    if _is_a("_functional_collectives", "AsyncCollectiveTensor", local):
        local = local.trigger_wait()  # the next reader would do the same
    return local  # type: ignore[no-any-return]


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; return any other tensor unchanged."""
    return tensor._local_tensor if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's local part; 0 for sparse and nested tensors."""
    part = part_of(tensor)
    return part.nbytes if part.layout is torch.strided and not part.is_nested else 0


def _is_wanted_leaf(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def _is_distributed(tensor: object) -> bool:
    return _is_a("tensor", "DTensor", tensor)


def _is_a(module: str, name: str, tensor: object) -> bool:
    """Return whether a tensor is of a torch.distributed class, without importing the class."""
    return type(tensor) is getattr(sys.modules.get(f"torch.distributed.{module}"), name, None)


class Distributed(SavedVersion):
    """Autograd's object for a DTensor: its layout over ranks, its version and its local tensor."""

    __slots__ = ("packed", "unpack_local")

    def __init__(
        self, tensor: torch.Tensor, packed: Any, unpack_local: Callable[[Any], torch.Tensor]
    ) -> None:
        """Note the present version of `tensor`; its local tensor was packed as `packed`."""
        token: Any = tensor.detach()
        token._local_tensor = nothing(tensor.device)
        super().__init__(token, tensor, 0)
        self.packed = packed
        self.unpack_local = unpack_local

    def unpack(self) -> torch.Tensor:
        """Return the DTensor with the local tensor's bytes at this moment.

        Raises:
            RuntimeError: it was modified in place after it was saved.
            StormError: the local tensor cannot be restored.
        """
        self.check()
        tensor: Any = self.token.detach()
        tensor._local_tensor = self.unpack_local(self.packed)
        return tensor  # type: ignore[no-any-return]
