"""The decision for a saved tensor: keep, offload or replay. A closed type, defined here only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["LAST", "NO_ACTIVATIONS", "OFFLOAD", "REPLAY", "Decision", "Keep", "Offload", "Replay"]


@dataclass(frozen=True, slots=True)
class Keep:
    """Autograd keeps the tensor on the device; statistics name the `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Offload:
    """The tensor is offloaded as soon as nothing else can modify it in place."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The tensor is freed, and recomputed by the operation that made it."""


Decision: TypeAlias = Keep | Offload | Replay

NO_ACTIVATIONS = frozenset({"parameter", "leaf", "zero", "meta"})
"""Keep reasons of tensors that take no memory beyond that of the model and the batch."""

OFFLOAD, REPLAY = Offload(), Replay()
LAST = Keep("last")
"""For values that the backward pass needs before the link would have offloaded them."""
