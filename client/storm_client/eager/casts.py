"""Tensors that autocast makes of what functions are given, and autograd saves.

No function of PyTorch's returns one: it is known by its node in the graph, and by that of the
argument which it is a copy of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch

from storm_client.eager.values import Seen

__all__ = ["Cast", "Casts"]

_CAST: Final = "ToCopyBackward0"
"""The name of a cast's node in the graph."""

_VERSION: Final = "storm_client: version of what was cast"
"""Among a node's metadata."""

_next_number = torch._C._autograd._get_sequence_nr


class Cast(NamedTuple):
    """A tensor that autocast has made of an argument."""

    seen: Seen
    node: Any
    """Its own, in the graph."""
    is_new: bool
    """Whether it was made by the function that runs, rather than kept by autocast."""
    dtype: torch.dtype

    def source_among(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the argument that it is a copy of, unless that may be another by now.

        Autocast keeps casts of parameters as long as it is on, also of those that are written to.
        """
        node = self.node.next_functions[0][0]
        source = next((tensor for tensor in tensors if _is_node_of(node, tensor)), None)
        if source is None:
            return None
        if self.is_new:
            self.node.metadata[_VERSION] = source._version
        return source if self.node.metadata.get(_VERSION) == source._version else None


class Casts:
    """Those that were saved since the last function of the table began."""

    def __init__(self) -> None:
        """Begin before the first function."""
        self._found: list[Cast] = []
        self._first_number = _next_number()
        """Of the nodes that are made from then on."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Cast]:
        return iter(self._found)

    def begin(self) -> None:
        """Begin anew: a function of the table begins."""
        self._first_number = _next_number()
        self.clear()

    def saved(self, seen: Seen, made: torch.Tensor) -> None:
        """Note what was saved for the first time, if autocast has made it."""
        node = made.grad_fn
        if node is not None and node.name() == _CAST:
            is_new = node._sequence_nr() >= self._first_number
            self._found.append(Cast(seen, node, is_new, made.dtype))

    def take(self) -> list[Cast]:
        """Return those that there are, and have none."""
        found, self._found = self._found, []
        return found

    def clear(self) -> None:
        """Have none."""
        if self._found:
            self._found.clear()


def _is_node_of(node: object, tensor: torch.Tensor) -> bool:
    """Tell whether a gradient for `tensor` goes to `node`."""
    if tensor.grad_fn is None:
        return getattr(node, "variable", None) is tensor
    return tensor.grad_fn is node
