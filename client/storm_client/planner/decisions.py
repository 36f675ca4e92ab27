"""The decision for a saved tensor: keep, offload or replay. A closed type, made in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["LAST", "NO_ACTIVATIONS", "OFFLOAD", "REPLAY", "Decision", "Keep", "Offload", "Replay"]


@dataclass(frozen=True, slots=True)
class Keep:
    """The tensor is kept on the device by autograd, for the `reason` that statistics name."""

    reason: str


@dataclass(frozen=True, slots=True)
class Offload:
    """The tensor is offloaded as soon as nobody else can write to it."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The tensor is freed, and recomputed by the operation that has made it."""


Decision: TypeAlias = Keep | Offload | Replay

NO_ACTIVATIONS = frozenset({"parameter", "leaf", "zero", "meta"})
"""Reasons of what takes no memory of its own besides the model's and the batch's."""

OFFLOAD, REPLAY = Offload(), Replay()
LAST = Keep("last")
"""Of what is asked for before the link would have offloaded it."""
