"""Marks storages that hold ANCF blobs, so that callers do not encode them again.

The mark is an attribute of the storage. So views share it, as do the detached copies of a tensor
that autograd makes. The mark lives as long as the storage. No bytes of a blob are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = ["is_encoded", "mark_encoded"]

_NAME: Final = "storm_encoded"


def mark_encoded(tensor: torch.Tensor) -> None:
    """Mark the tensor's whole storage as encoded: encoding it again would gain nothing."""
    setattr(tensor.untyped_storage(), _NAME, True)


def is_encoded(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage was marked."""
    return getattr(storage, _NAME, False)
