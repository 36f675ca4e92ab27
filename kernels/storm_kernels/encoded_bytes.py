"""A mark on memory that holds ANCF blobs, for whoever would encode it again.

The mark is on the storage, so views share it, and detached copies of the tensor that autograd
makes. It ends with the storage. Nothing of a blob is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = ["is_encoded", "mark_encoded"]

_NAME: Final = "storm_encoded"


def mark_encoded(tensor: torch.Tensor) -> None:
    """Say that all of a tensor's memory is encoded: to encode it again would gain nothing."""
    setattr(tensor.untyped_storage(), _NAME, True)


def is_encoded(storage: torch.UntypedStorage) -> bool:
    """Tell whether a storage was marked."""
    return getattr(storage, _NAME, False)
