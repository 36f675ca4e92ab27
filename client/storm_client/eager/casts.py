"""Finds the tensors that autocast makes of functions' arguments and that autograd saves.

No PyTorch function returns such a cast. It is recognised by its own node in the graph and by the
node of the argument that it copies. Of an argument with other strides autograd saves a copy of the
cast, which a hidden call has made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch

from storm_client.eager.tracked import TrackedStorage

__all__ = ["Cast", "Casts", "is_cast"]

_CAST: Final = "ToCopyBackward0"
"""The name of a cast's node in the graph."""

_VERSION: Final = "storm_client: version of what was cast"
"""Key in a node's metadata."""

_next_number = torch._C._autograd._get_sequence_nr


class Cast(NamedTuple):
    """A tensor that autocast has made from an argument."""

    tracked: TrackedStorage
    node: Any
    """The cast's own node in the graph."""
    is_new: bool
    """Whether the running function made the cast; False if it comes from autocast's cache."""
    made: torch.Tensor

    def is_cached(self, source: torch.Tensor) -> bool:
        """Return whether autocast caches the cast of `source`, until autocast ends."""
        return source.requires_grad and source.is_leaf and torch.is_autocast_cache_enabled()

    def source_among(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the argument that the cast copies; None if it may have changed since.

        Autocast caches casts of parameters as long as it is on, even when a parameter is modified.
        """
        node = self.node.next_functions[0][0]
        source = next((tensor for tensor in tensors if _is_node_of(node, tensor)), None)
        if source is None:
            return None
        if self.is_new:
            self.node.metadata[_VERSION] = source._version
        return source if self.node.metadata.get(_VERSION) == source._version else None


class Casts:
    """The casts saved since the last function of the table began."""

    def __init__(self) -> None:
        """Start before the first function."""
        self._found: list[Cast] = []
        self._first_number = _next_number()
        """The first sequence number of the nodes made from then on."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Cast]:
        return iter(self._found)

    def begin(self) -> None:
        """Forget all casts: a function of the table begins."""
        self._first_number = _next_number()
        self.clear()

    def add(self, tracked: TrackedStorage, made: torch.Tensor) -> None:
        """Record a value that is saved or copied for the first time, if autocast has made it."""
        node = made.grad_fn
        if node is not None and is_cast(made):
            is_new = node._sequence_nr() >= self._first_number
            self._found.append(Cast(tracked, node, is_new, made))

    def take(self) -> list[Cast]:
        """Return the casts and forget them."""
        found, self._found = self._found, []
        return found

    def clear(self) -> None:
        """Forget all casts."""
        if self._found:
            self._found.clear()


def is_cast(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be a cast by autocast, as far as its node in the graph tells."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == _CAST


def _is_node_of(node: object, tensor: torch.Tensor) -> bool:
    """Return whether `node` receives the gradient of `tensor`."""
    if tensor.grad_fn is None:
        return getattr(node, "variable", None) is tensor
    return tensor.grad_fn is node
