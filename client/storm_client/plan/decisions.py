"""What may become of a saved tensor: a closed type, decided in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

__all__ = ["LAST", "OFFLOAD", "REPLAY", "Decision", "Keep", "Offload", "Replay"]


@dataclass(frozen=True, slots=True)
class Keep:
    """The tensor stays with autograd, for the `reason` that statistics name."""

    reason: str
    stays: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Offload:
    """The tensor leaves as soon as nobody else can write to it, but for its last `stays` bytes."""

    stays: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """The tensor is given up, and made again by the operation that has made it.

    What is handed over of it while that is tried leaves as a whole.
    """

    stays: ClassVar[int] = 0


Decision: TypeAlias = Keep | Offload | Replay

OFFLOAD, REPLAY = Offload(), Replay()
LAST = Keep("last")
"""Of what is asked for before the link would have taken it."""
