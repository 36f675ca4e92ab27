"""Warns of a model that is compiled as a whole, which offload makes no smaller.

All that such a graph has saved is asked for at its backward's first moment: the graph takes its
saved tensors as arguments. Blocks that are compiled one by one are asked for one by one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable

import torch

__all__ = ["HANDLED", "CompiledModels"]


class _Handled(threading.local):
    depth = 0


HANDLED = _Handled()
"""How many graphs of the stormd backend this thread is in: what they save is decided already."""


class CompiledModels:
    """What has been said, for one Offload."""

    def __init__(self) -> None:
        self._said = False

    def look(self, modules: Iterable[torch.nn.Module]) -> None:
        """Warn once if one of the modules that offload was given is compiled itself."""
        if self._said:
            return
        for module in modules:
            if is_compiled(module) and _compiler(module) != "stormd":
                self._said = True
                warnings.warn(
                    f"{_name(module)} is compiled as a whole: its backward pass begins by asking "
                    "for all that was saved, so offload does not lower the peak; compile it by "
                    'storm_client.compile(model) or torch.compile(model, backend="stormd"), which '
                    "puts the offload into the graph, or compile its blocks, as in `for block in "
                    "model.layers: block.compile()`",
                    RuntimeWarning,
                    stacklevel=3,
                )


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether calling `module` calls what torch.compile made, by either of its spellings."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _compiler(module: torch.nn.Module) -> str | None:
    """Return the name of the backend that a compiled module was given to."""
    if module._compiled_call_impl is None:
        callback = getattr(getattr(module, "dynamo_ctx", None), "callback", None)
    else:
        function = module._compiled_call_impl
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))
        callback = cells["callback"].cell_contents if "callback" in cells else None
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return getattr(callback, "compiler_name", None)


def _name(module: torch.nn.Module) -> str:
    return type(getattr(module, "_orig_mod", module)).__name__
