"""Modules whose forward runs inside something: an Offload's block, or a mark on the thread.

A module's `forward` is replaced on the object, as accelerate does for mixed precision, and not
bracketed by forward hooks: those are not called where Ctrl-C ends a forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from storm_client.errors import UsageError
from storm_client.offloading import Offload

__all__ = ["Forward", "enter_in_forward", "offload_only"]


class Forward:
    """A module's forward that runs inside a context; `inspect.signature` sees through it."""

    def __init__(
        self, forward: Callable[..., Any], context: AbstractContextManager[object]
    ) -> None:
        """Run `forward` inside `context`, which is entered once a call."""
        self.__wrapped__ = forward
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward returns."""
        with self._context:
            return self.__wrapped__(*args, **kwargs)


class LayerDepth(threading.local):
    """How many of the chosen layers each thread is inside of."""

    depth = 0

    def __enter__(self) -> None:
        """Note that this thread begins the forward of one."""
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        """Note that it has left it."""
        self.depth -= 1

    def __reduce__(self) -> tuple[type[LayerDepth], tuple[()]]:
        """Copy and pickle as one that no thread is inside of."""
        return LayerDepth, ()


def enter_in_forward(module: torch.nn.Module, context: AbstractContextManager[object]) -> None:
    """Have each forward of `module` run inside `context`; a second call replaces the context."""
    forward = vars(module).get("forward", module.forward)
    own = forward.__wrapped__ if isinstance(forward, Forward) else forward
    module.forward = Forward(own, context)


def offload_only(offload: Offload, layers: Iterable[torch.nn.Module]) -> None:
    """Have only what autograd saves in the forward of `layers` leave, inside the Offload's blocks.

    What is saved elsewhere stays with PyTorch, and counts as skipped, "outside". A second call
    replaces the layers of the first. A copy of the Offload offloads everything.

    Raises:
        UsageError: `layers` holds no module, or something else; nothing was changed.
    """
    chosen = list(layers)
    strange = next((one for one in chosen if not isinstance(one, torch.nn.Module)), None)
    if strange is not None or not chosen:
        found = "no module" if strange is None else f"an object of type {type(strange).__name__}"
        raise UsageError(
            f"offload_only got {found}; pass the layers, for example model.model.layers of a Llama"
        )
    inside = LayerDepth()
    for layer in chosen:
        enter_in_forward(layer, inside)
    offload._policy.layers = inside
