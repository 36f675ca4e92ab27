"""Whether a step finds gradients of parameters, or makes them as its backward pass goes on.

With new ones the device fills up towards the end of the backward pass, so that much may lie there
before that which is gone by then. Where they lie there from the begin, nothing is won so.
"""

from __future__ import annotations

import weakref

import torch

__all__ = ["Gradients", "may_lie_elsewhere"]


class Gradients:
    """What is known of them in the steps of one signature, or in one step."""

    __slots__ = ("_parameter", "are_found")

    def __init__(self) -> None:
        """Know nothing: new ones are expected."""
        self.are_found = False
        """Whether some were there, or may go before the backward pass has ended."""
        self._parameter: weakref.ref[torch.Tensor] | None = None

    def reads(self, parameter: torch.Tensor) -> None:
        """Note a parameter that a forward pass reads."""
        if self._parameter is None:
            self._parameter = weakref.ref(parameter)
        self.are_found |= _is_there(parameter)

    def join(self, other: Gradients) -> bool:
        """Add what a step has shown; tell whether that is news."""
        self._parameter = self._parameter or other._parameter
        return self._found(is_there=other.are_found)

    def look(self) -> bool:
        """Look at one parameter as a step begins; tell whether its gradient is news."""
        parameter = None if self._parameter is None else self._parameter()
        return self._found(is_there=parameter is not None and _is_there(parameter))

    def _found(self, *, is_there: bool) -> bool:
        is_news = is_there and not self.are_found
        self.are_found |= is_there
        return is_news


def _is_there(parameter: torch.Tensor) -> bool:
    """Tell whether a gradient is there, or is used by a hook as soon as it is."""
    return parameter.grad is not None or bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def may_lie_elsewhere() -> bool:
    """Tell whether ranks train: DDP's buckets are there from the begin, others share gradients."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
