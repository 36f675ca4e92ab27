"""What a call keeps for its backward pass, and neither reads nor returns: its byproduct.

Nobody is given that tensor, and of the call's result it is no part. So the call is repeated, and
what autograd is to keep of that is the tensor. There are three of them.

Dropout's mask depends on what was drawn, and on how the input lies in memory: by that a kernel
chooses who draws which number. What is in the input is not needed. The indices of pooling depend
on their input. And what writes over its input keeps a copy where its gradient needs that, as
`silu_` does: for those nothing is repeated but what the input was made by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, Final

import torch

__all__ = ["FORMER", "Byproduct", "Depends", "kept_among"]


class Depends(IntEnum):
    """What a byproduct depends on; as in native/script.h."""

    LAYOUT = 1
    """How the first argument lies in memory, and what is drawn."""
    VALUES = 2
    """The arguments."""
    FORMER = 3
    """What the first argument was before it was written over."""


class Byproduct:
    """Returns what a function keeps of a call."""

    def __init__(self, function: Callable[..., Any], name: str, depends: Depends) -> None:
        """`function` writes to no argument, and nobody can replace what it does."""
        self._function = function
        self.depends = depends
        self.__name__ = name

    def __call__(self, values: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        """Return it, as no part of any graph.

        Raises:
            RuntimeError: the call keeps nothing, or several tensors.
        """
        saved: list[torch.Tensor] = []
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, _nothing):
            given = values.detach().requires_grad_()
            made = self._function(given, *others, **options)
        kept = kept_among(saved, (given, made))
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
"""Returns the memory that it is given, which nobody else has."""


def kept_among(saved: Iterable[torch.Tensor], known: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the one of the tensors that lies in no memory of the known; None if it is not one."""
    addresses = {tensor.untyped_storage()._cdata for tensor in known}
    found = [one for one in saved if one.untyped_storage()._cdata not in addresses]
    return found[0] if len(found) == 1 else None


def _nothing(_: Any) -> Any:
    """Return nothing: nobody goes back through this graph."""
