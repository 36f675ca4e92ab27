"""What the planner is told of a step: the values that it makes and saves, and how long it takes.

Whoever sees a step makes a `Problem` of it, the eager recording of what it has seen or a graph of
its nodes. The planner knows nothing else of where the values come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["Problem", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """One storage at one version, in the order in which a step makes them."""

    number: int
    """Its place among the step's values."""
    nbytes: int
    """Of the whole storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    operation: str = ""
    """The name of the operation that recomputes it; empty where none can."""
    is_expensive: bool = False
    """Whether that is a product or attention, which take longer than memory traffic does."""
    inputs: tuple[int, ...] = ()
    """The numbers of the large values it is recomputed from; -1 for what stays in any case."""
    seconds: float = 0.0
    """Of the operation, as it was timed; 0.0 where it was not."""
    uses: int = 0
    """How often autograd saves it."""
    is_given: bool = False
    """Whether no operation made it, as a batch, a mask or a table."""
    parameter_bytes: int = 0
    """Of parameters whose gradients come to be when its making is undone."""
    gathered_bytes: int = 0
    """The same of parameters that are gathered for it, whose gradients do not stay either."""

    @property
    def is_saved(self) -> bool:
        """Whether autograd saves it."""
        return self.uses > 0


@dataclass(frozen=True)
class Problem:
    """One step to plan."""

    values: tuple[Value, ...]
    rejected: Mapping[int, str] = field(default_factory=dict)
    """Values that were found not to be recomputable, with the reason."""
    recomputes: bool = True
    """Whether anything may be recomputed at all."""
    why_not: str = ""
    """If it may not: the reason, empty where that is nothing to tell the user."""
    forward_seconds: float | None = None
    """Of the forward pass as it was timed; None before that."""
    turn_seconds: float = math.inf
    """From the end of the forward pass until the backward pass asks for something."""
    last_bytes: int = 0
    """In-flight limit at the end of the forward pass: of what is saved last so much may stay."""
    used_between: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """At which moments of the backward pass saved values are asked for first and last; a moment has
    the number of the value whose making is undone. Empty where that is not known."""
    block_ends: frozenset[int] = frozenset()
    """Values that checkpointing would keep: others are recomputed from them, and not they."""
    plain_loss_bytes: int = 0
    """What PyTorch's own loss would take beyond what the step saves, where tiles compute it."""
    finds_gradients: bool = True
    """Whether gradients of parameters may be there when the step begins."""
    lacked_bytes: int = 0
    """What devices have lacked so far, and is left free."""

    def may_recompute(self, value: Value) -> bool:
        """Tell whether a value may be recomputed, as far as its own operation goes."""
        return self.recomputes and bool(value.operation) and value.number not in self.rejected

    def why_not_recomputed(self, number: int) -> str:
        """Return why a value is never recomputed; empty where nothing forbids it."""
        return self.rejected.get(number, "" if self.recomputes else self.why_not)

    @property
    def checkpointed_bytes(self) -> int:
        """What checkpointing each block would keep; 0 where no blocks are known."""
        return self.nbytes(self.block_ends)

    def nbytes(self, numbers: Iterable[int]) -> int:
        """Return the bytes of some values together."""
        return sum(self.values[number].nbytes for number in numbers)

    @property
    def saved(self) -> list[Value]:
        """What autograd saves."""
        return [value for value in self.values if value.is_saved]
