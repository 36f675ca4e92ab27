"""How much memory devices lacked in steps so far: the next plans have so much less room."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["lacked", "note_shortage"]

_LACKED: dict[torch.device, int] = {}


def note_shortage(device: torch.device, nbytes: int) -> None:
    """Note that `nbytes` could not be allocated though nothing was in flight any more."""
    _LACKED[device] = _LACKED.get(device, 0) + nbytes


def lacked(devices: Iterable[torch.device]) -> int:
    """Return how many bytes the device that lacked the most of these has lacked so far."""
    return max((_LACKED.get(device, 0) for device in devices), default=0)
