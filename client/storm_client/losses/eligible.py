"""Of which logits a block has the loss computed in tiles: where nothing else looks at them."""

from __future__ import annotations

import torch
from torch import Tensor

from storm_client.devices import is_capturing
from storm_client.eager.function_modes import are_altered
from storm_client.hook_stack import innermost
from storm_client.losses.cross_entropy import is_plain
from storm_client.losses.log_probabilities import TILE_BYTES

__all__ = ["is_asked_for", "is_eligible"]


def is_asked_for() -> bool:
    """Tell whether the thread is in a block, innermost of what hooks saved tensors, that asks."""
    return bool(getattr(innermost(), "tiles_losses", False))


def is_eligible(logits: Tensor) -> bool:
    """Tell whether logits are a plain tensor of more than a tile, and need a gradient."""
    if not (is_plain(logits) and logits.requires_grad and torch.is_grad_enabled()):
        return False
    least = TILE_BYTES.get(logits.device.type)
    if least is None or logits.numel() * torch.float32.itemsize <= least:
        return False
    return not (are_altered() or (logits.is_cuda and is_capturing(logits.device)))
