"""A call's byproduct: the tensor it saves for its backward pass but neither reads nor returns.

A byproduct is not an argument of the call and not part of its result. To recompute the byproduct,
the call is repeated, and the tensor that autograd saves then is taken. There are three kinds:

- Dropout's mask depends on the random numbers drawn and on the layout of the input in memory,
  because the kernel assigns numbers to elements by layout. The input's contents are not needed.
- The indices of pooling depend on the input's contents.
- An operation that overwrites its input, as `silu_` does, saves a copy of it where its gradient
  needs that. For such a copy only the operation that made the input is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, Final

import torch

__all__ = ["FORMER", "Byproduct", "Depends", "byproduct_among"]


class Depends(IntEnum):
    """What a byproduct depends on; as in native/script.h."""

    LAYOUT = 1
    """The layout of the first argument in memory, and the random numbers drawn."""
    VALUES = 2
    """The arguments."""
    FORMER = 3
    """The contents of the first argument before the call overwrote it."""


class Byproduct:
    """A function that returns the byproduct of a call of another function."""

    def __init__(self, function: Callable[..., Any], name: str, depends: Depends) -> None:
        """`function` writes to no argument, and its behaviour cannot be replaced."""
        self._function = function
        self.depends = depends
        self.__name__ = name

    def __call__(self, values: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        """Call the function and return its byproduct, detached from any graph.

        Raises:
            RuntimeError: the call has no byproduct, or several.
        """
        saved: list[torch.Tensor] = []
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, _nothing):
            given = values.detach().requires_grad_()
            made = self._function(given, *others, **options)
        kept = byproduct_among(saved, (given, made))
        if kept is None:
            raise RuntimeError(f"{self.__name__}: {len(saved)} tensors are kept now, and one was")
        return kept.detach()


class _Former(Byproduct):
    def __init__(self) -> None:
        super().__init__(_itself, "copy of what is written over", Depends.FORMER)

    def __call__(self, values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return values


def _itself(values: torch.Tensor) -> torch.Tensor:
    return values


FORMER: Final = _Former()
"""Returns its first argument, whose memory nobody else holds."""


def byproduct_among(
    saved: Iterable[torch.Tensor], known: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """Return the only saved tensor that shares no storage with `known`; None unless exactly one."""
    addresses = {tensor.untyped_storage()._cdata for tensor in known}
    found = [one for one in saved if one.untyped_storage()._cdata not in addresses]
    return found[0] if len(found) == 1 else None


def _nothing(_: Any) -> Any:
    """Return None: no backward pass runs through this graph."""
