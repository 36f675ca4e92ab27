"""The planner's input for one step: the values that the step makes and saves, and its times.

Each caller that observes a step builds a `Problem`: the eager mode from a recording, the compiler
from the nodes of a graph. The planner knows nothing else about the origin of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = ["NO_LOSS", "PlainLoss", "Problem", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """One storage at one version. A step's values are in the order in which they are made."""

    number: int
    """Index among the step's values."""
    nbytes: int
    """Size of the whole storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    operation: str = ""
    """Name of the operation that recomputes the value; empty if none can."""
    is_expensive: bool = False
    """Whether this operation is a matrix product or attention: slower than memory traffic."""
    inputs: tuple[int, ...] = ()
    """Numbers of the large values it is recomputed from; -1 for inputs that are kept in any
    case."""
    seconds: float = 0.0
    """Measured time of the operation; 0.0 if it was not measured."""
    uses: int = 0
    """How often autograd saves the value."""
    is_given: bool = False
    """Whether no operation made it from what needs gradients: a batch, a mask or a table."""
    is_made_inside: bool = False
    """Whether the step makes it without a gradient, so that it does not exist before."""
    parameter_bytes: int = 0
    """Bytes of parameters whose gradients are created in the backward pass of its operation."""
    gathered_bytes: int = 0
    """The same for parameters gathered for its operation. Neither they nor their gradients are
    kept."""
    is_cached: bool = False
    """Whether autocast holds it until the forward pass ends: the cast of a parameter."""
    device: int | None = None
    """Index of its GPU; None on the host, and if all values are in one memory."""

    @property
    def is_saved(self) -> bool:
        """Whether autograd saves the value."""
        return self.uses > 0


class PlainLoss(NamedTuple):
    """Bytes that PyTorch's own loss takes at its fullest, beyond the logits that tiles save."""

    forward_bytes: int
    backward_bytes: int

    def or_larger(self, other: PlainLoss) -> PlainLoss:
        """Return the larger bytes of each pass."""
        return PlainLoss(*map(max, self, other))


NO_LOSS = PlainLoss(0, 0)
"""No loss is computed in tiles."""


@dataclass(frozen=True)
class Problem:
    """One step to plan."""

    values: tuple[Value, ...]
    rejected: Mapping[int, str] = field(default_factory=dict)
    """Values that proved not to be recomputable, with the reason."""
    recomputes: bool = True
    """Whether any value may be recomputed."""
    why_not: str = ""
    """The reason if `recomputes` is False; empty if the user need not be informed."""
    forward_seconds: float | None = None
    """Measured time of the forward pass; None before it was measured."""
    turn_seconds: float = math.inf
    """From the end of the forward pass until the backward pass needs its first saved value."""
    last_bytes: int = 0
    """In-flight limit at the end of the forward pass: so many bytes of the last saved values may be
    kept."""
    used_between: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The moments of the backward pass at which each saved value is needed first and last. A moment
    is the number of the value whose operation runs backward then. Empty if the moments are not
    known."""
    block_ends: frozenset[int] = frozenset()
    """Values that checkpointing would keep. Others are recomputed from them; they are never
    recomputed themselves."""
    plain_loss: PlainLoss = NO_LOSS
    """If tiles compute the loss: what PyTorch's own loss would need."""
    finds_gradients: bool = True
    """Whether gradients of parameters may already exist when the step begins."""
    lacked_bytes: int = 0
    """Bytes that devices were short of so far. Plans leave so many bytes free."""

    def may_recompute(self, value: Value) -> bool:
        """Return whether a value may be recomputed, judged by its own operation alone."""
        return self.recomputes and bool(value.operation) and value.number not in self.rejected

    def why_not_recomputed(self, number: int) -> str:
        """Return why a value is never recomputed; empty if nothing forbids recomputing it."""
        return self.rejected.get(number, "" if self.recomputes else self.why_not)

    @property
    def checkpointed_bytes(self) -> int:
        """Bytes that checkpointing each block would keep; 0 if no blocks are known."""
        return self.nbytes(self.block_ends)

    def nbytes(self, numbers: Iterable[int]) -> int:
        """Return the total bytes of some values."""
        return sum(self.values[number].nbytes for number in numbers)

    @property
    def saved(self) -> list[Value]:
        """The values that autograd saves."""
        return [value for value in self.values if value.is_saved]
