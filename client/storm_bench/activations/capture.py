"""Takes hold of what autograd saves in one training step.

A storage is captured once and whole, however many views of it are saved, and parameters are left
out, as the client does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

from storm_bench.activations.models import Family, train

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["captured"]


def captured(family: Family, steps: int, min_bytes: int) -> list[Tensor]:
    """Return the storages of `min_bytes` and more that step number `steps` of `family` saves.

    They are flat tensors of the type they were saved as, in the order of the forward pass.
    """
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= min_bytes:
            saved.setdefault(storage.data_ptr(), tensor.detach())
        return tensor

    model = train(family, steps, saved_tensors_hooks(pack, lambda tensor: tensor))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return [_whole(tensor) for key, tensor in saved.items() if key not in parameters]


def _whole(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
