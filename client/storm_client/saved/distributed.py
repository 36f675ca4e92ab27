"""How a DTensor is saved: as the local tensor that it wraps, which is handled as any other is.

A DTensor has no memory of its own, but a version: operations on it run on local tensors, below what
counts their changes. So its version is what the backward pass compares.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from storm_client.saved.snapshots import base_of
from storm_client.saved.versions import SavedVersion, nothing

__all__ = ["Distributed", "local_of", "part_of"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the local tensor of a DTensor; None for what is none, or has to be kept as it is.

    Those are parameters, other leaves that get gradients, and what has been written to: its local
    tensor, whose version is the old one, may be known as what it was before.
    """
    if type(tensor) in _PLAIN or not _is_distributed(tensor):
        return None
    base: Any = base_of(tensor)
    if base._version or isinstance(base, torch.nn.Parameter) or _is_wanted_leaf(base):
        return None
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    if _is_a("_functional_collectives", "AsyncCollectiveTensor", local):
        local = local.trigger_wait()  # as what reads it would do next
    return local  # type: ignore[no-any-return]


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of any DTensor, and what is none as it is."""
    return tensor._local_tensor if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _is_wanted_leaf(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def _is_distributed(tensor: object) -> bool:
    return _is_a("tensor", "DTensor", tensor)


def _is_a(module: str, name: str, tensor: object) -> bool:
    """Tell whether a tensor is of a class of torch.distributed's, which is not imported here."""
    return type(tensor) is getattr(sys.modules.get(f"torch.distributed.{module}"), name, None)


class Distributed(SavedVersion):
    """What autograd holds for a DTensor: where its parts lie, its version and its local tensor."""

    __slots__ = ("packed", "unpack_local")

    def __init__(
        self, tensor: torch.Tensor, packed: Any, unpack_local: Callable[[Any], torch.Tensor]
    ) -> None:
        """Note the present version of `tensor`, whose local one was packed as `packed`."""
        token: Any = tensor.detach()
        token._local_tensor = nothing(tensor.device)
        super().__init__(token, tensor, 0)
        self.packed = packed
        self.unpack_local = unpack_local

    def unpack(self) -> torch.Tensor:
        """Return the tensor with the bytes that its local one has by now.

        Raises:
            RuntimeError: it was changed in place since.
            StormError: the local tensor cannot be had again.
        """
        self.check()
        tensor: Any = self.token.detach()
        tensor._local_tensor = self.unpack_local(self.packed)
        return tensor  # type: ignore[no-any-return]
