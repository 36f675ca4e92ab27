"""What may become of a saved tensor: a closed type, decided in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["LAST", "OFFLOAD", "REPLAY", "Decision", "Keep", "Offload", "Replay"]


@dataclass(frozen=True, slots=True)
class Keep:
    """The tensor stays with autograd, for the `reason` that statistics name."""

    reason: str


@dataclass(frozen=True, slots=True)
class Offload:
    """The tensor leaves as soon as nobody else can write to it."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The tensor is given up, and made again by the operation that has made it."""


Decision: TypeAlias = Keep | Offload | Replay

OFFLOAD, REPLAY = Offload(), Replay()
LAST = Keep("last")
"""Of what is asked for before the link would have taken it."""
