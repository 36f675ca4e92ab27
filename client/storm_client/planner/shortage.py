"""How much memory devices were short of in steps so far. Later plans use so much less."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["record_shortage", "shortage_bytes"]

_SHORTAGES: dict[torch.device, int] = {}


def record_shortage(device: torch.device, nbytes: int) -> None:
    """Note that `nbytes` could not be allocated although nothing was in flight any more."""
    _SHORTAGES[device] = _SHORTAGES.get(device, 0) + nbytes


def shortage_bytes(devices: Iterable[torch.device]) -> int:
    """Return the largest shortage so far of any of these devices, in bytes."""
    return max((_SHORTAGES.get(device, 0) for device in devices), default=0)
