"""Whether gradients of parameters exist when a step begins, or its backward pass creates them.

New gradients fill the device towards the end of the backward pass. So earlier in the step there is
memory for values that are freed by then. Gradients that exist from the begin leave no such memory.
"""

from __future__ import annotations

import torch

__all__ = ["Gradients", "may_lie_elsewhere"]


class Gradients:
    """What is known of the gradients in the steps of one signature, or in one step."""

    __slots__ = ("_parameter", "are_found")

    def __init__(self) -> None:
        """Start without knowledge: new gradients are expected."""
        self.are_found = False
        """Whether some existed, or a hook may use and free them before the backward pass ends."""
        self._parameter: torch.Tensor | None = None
        """The smallest parameter read. PyTorch refuses to swap one that has a weak reference."""

    def reads(self, parameter: torch.Tensor) -> None:
        """Record a parameter that a forward pass reads."""
        if self._parameter is None or parameter.nbytes < self._parameter.nbytes:
            self._parameter = parameter
        self.are_found |= _is_there(parameter)

    def join(self, other: Gradients) -> bool:
        """Add what a step has shown; return whether that is new."""
        if self._parameter is None:
            self._parameter = other._parameter
        return self._found(is_there=other.are_found)

    def look(self) -> bool:
        """Look at one parameter as a step begins; return whether its gradient is new knowledge."""
        return self._found(is_there=self._parameter is not None and _is_there(self._parameter))

    def _found(self, *, is_there: bool) -> bool:
        is_news = is_there and not self.are_found
        self.are_found |= is_there
        return is_news


def _is_there(parameter: torch.Tensor) -> bool:
    """Return whether a gradient exists, or a hook will use it as soon as it does."""
    return parameter.grad is not None or bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def may_lie_elsewhere() -> bool:
    """Return whether ranks train: DDP's buckets exist from the begin, others shard gradients."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
