"""Warns of a model that is compiled as a whole, for which offload does not lower the peak.

A compiled backward graph takes its saved tensors as arguments, so it needs all of them when it
begins. Blocks that are compiled one by one need them one by one. Whether an Offload's module is
itself compiled is looked up. Whether a compiled caller contains it, such as the result of
`torch.compile(model)`, shows in how much one graph saves.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any, Final

import torch

from storm_client.hook_stack import untraced
from stormd.protocol.sizes import format_size

__all__ = ["HANDLED", "CompiledModels", "backend_of"]


class _Handled(threading.local):
    depth = 0


HANDLED = _Handled()
"""Number of stormd-backend graphs that this thread is in: their saves are decided already."""


class CompiledModels:
    """The warning state of one Offload."""

    def __init__(self) -> None:
        self._has_warned = False
        self.graph_bytes = 0
        """The most that one graph has saved."""
        self._counted = (0, 0)
        """The graph that saved last, by autograd's sequence number, and its saved bytes so far."""

    def warn_if_compiled(self, modules: Iterable[torch.nn.Module]) -> None:
        """Warn once if one of the Offload's modules is compiled itself."""
        if self._has_warned:
            return
        for module in modules:
            if is_compiled(module) and _compiler(module) != "stormd":
                self._has_warned = True
                warnings.warn(
                    f"{_name(module)} is compiled as a whole: its backward pass begins by asking "
                    "for all that was saved, so offload does not lower the peak; compile it by "
                    'storm_client.compile(model) or torch.compile(model, backend="stormd"), which '
                    "puts the offload into the graph, or compile its blocks, as in `for block in "
                    "model.layers: block.compile()`",
                    RuntimeWarning,
                    stacklevel=3,
                )

    @untraced
    def count_saved(self, nbytes: int) -> None:
        """Count the bytes that autograd has just saved, if a compiled graph made them."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _module_of(frame) in _BETWEEN:
            frame = frame.f_back
        if frame is None or not _module_of(frame).startswith(_GRAPHS):
            return
        number = _autograd._get_sequence_nr()
        last, counted = self._counted
        self._counted = number, nbytes + (counted if number == last else 0)
        self.graph_bytes = max(self.graph_bytes, self._counted[1])

    def advice(self, saved_bytes: int) -> str | None:
        """Return the warning, once, for steps that save so much each; None if blocks save it."""
        if self._has_warned or self.graph_bytes <= saved_bytes // 2:
            return None
        self._has_warned = True
        return (
            f"one compiled graph saves {format_size(self.graph_bytes)} of the "
            f"{format_size(saved_bytes)} that autograd saves in a step, and its backward pass "
            "begins by asking for all of it, so offload does not lower the peak; compile the model "
            'by storm_client.compile(model) or torch.compile(model, backend="stormd"), which puts '
            "the offload into the graph, or compile its blocks, as in `for block in model.layers: "
            "block.compile()`"
        )


_GRAPHS: Final = "torch._functorch._aot_autograd."
"""Modules of the code that runs a graph, in an autograd function whose `apply` saves tensors."""

_BETWEEN: Final = frozenset({"storm_client.hooks", "torch.autograd.function"})
"""Modules of functions between those and `count_saved`, before PyTorch 2.14 with `apply`."""

_autograd: Any = torch._C._autograd


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calling `module` runs torch.compile's result, by either way of compiling."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def backend_of(compiled: Any) -> Any:
    """Return the backend that compiled a module or function; None if torch.compile did not.

    Each call of torch.compile makes its own backend object.
    """
    context = getattr(compiled, "dynamo_ctx", None)
    if context is not None:
        callback = getattr(context, "callback", None)
    else:
        function = getattr(compiled, "_compiled_call_impl", None) or compiled
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))
        callback = cells["callback"].cell_contents if "callback" in cells else None
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return callback


def _module_of(frame: FrameType) -> str:
    """Return the name of the module that defines a frame's function; empty if it has none."""
    return frame.f_globals.get("__name__") or ""


def _compiler(module: torch.nn.Module) -> str | None:
    """Return the name of the backend that compiled a module."""
    return getattr(backend_of(module), "compiler_name", None)


def _name(module: torch.nn.Module) -> str:
    return type(getattr(module, "_orig_mod", module)).__name__
