"""Runs a module's forward inside a context: an Offload's block, or a mark on the thread.

A module's `forward` is replaced on the object, as accelerate does for mixed precision. Forward
hooks are not used for this: PyTorch does not call them if Ctrl-C ends a forward.
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
    """A module's forward that runs inside a context; `inspect.signature` shows the original's."""

    def __init__(
        self, forward: Callable[..., Any], context: AbstractContextManager[object]
    ) -> None:
        """Run `forward` inside `context`, which is entered once per call."""
        self.__wrapped__ = forward
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's own forward."""
        with self._context:
            return self.__wrapped__(*args, **kwargs)


class LayerDepth(threading.local):
    """For each thread, how many of the chosen layers' forwards it is in."""

    depth = 0

    def __enter__(self) -> None:
        """Note that this thread begins the forward of a layer."""
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def __reduce__(self) -> tuple[type[LayerDepth], tuple[()]]:
        """Copy and pickle as an object that no thread is inside of."""
        return LayerDepth, ()


def enter_in_forward(module: torch.nn.Module, context: AbstractContextManager[object]) -> None:
    """Run each forward of `module` inside `context`; a second call replaces the context."""
    forward = vars(module).get("forward", module.forward)
    own = forward.__wrapped__ if isinstance(forward, Forward) else forward
    module.forward = Forward(own, context)


def offload_only(offload: Offload, layers: Iterable[torch.nn.Module]) -> None:
    """Offload only what autograd saves in the forward of `layers`, inside the Offload's blocks.

    Values that are saved elsewhere are kept on the device, and count as skipped, "outside". A
    second call replaces the layers of the first. A copy of the Offload offloads everything.

    Raises:
        UsageError: `layers` holds no module, or other objects; nothing was changed.
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
