"""Warns of a model that is compiled as a whole, which offload makes no smaller.

All that such a graph has saved is asked for at its backward's first moment: the graph takes its
saved tensors as arguments. Blocks that are compiled one by one are asked for one by one. Whether a
module that offload was given is itself compiled is looked up; whether something else that is
compiled calls it, as what `torch.compile(model)` has returned, shows in what one graph saves.
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
"""How many graphs of the stormd backend this thread is in: what they save is decided already."""


class CompiledModels:
    """What has been said, for one Offload."""

    def __init__(self) -> None:
        self._said = False
        self.graph_bytes = 0
        """What one graph has saved at most."""
        self._counted = (0, 0)
        """The graph that has saved last, by its place in autograd's sequence, and what so far."""

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

    @untraced
    def saves(self, nbytes: int) -> None:
        """Count what autograd has saved just now, if a compiled graph has made it."""
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
        """Return what to say, once, of steps that save so much each; None if blocks save it."""
        if self._said or self.graph_bytes <= saved_bytes // 2:
            return None
        self._said = True
        return (
            f"one compiled graph saves {format_size(self.graph_bytes)} of the "
            f"{format_size(saved_bytes)} that autograd saves in a step, and its backward pass "
            "begins by asking for all of it, so offload does not lower the peak; compile the model "
            'by storm_client.compile(model) or torch.compile(model, backend="stormd"), which puts '
            "the offload into the graph, or compile its blocks, as in `for block in model.layers: "
            "block.compile()`"
        )


_GRAPHS: Final = "torch._functorch._aot_autograd."
"""Modules of what runs a graph, by an autograd function whose `apply` saves what is to be saved."""

_BETWEEN: Final = frozenset({"storm_client.hooks", "torch.autograd.function"})
"""Modules of functions between those and `saves`. Before PyTorch 2.14 `apply` is one of them."""

_autograd: Any = torch._C._autograd


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether calling `module` calls what torch.compile made, by either of its spellings."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def backend_of(compiled: Any) -> Any:
    """Return what torch.compile gave graphs of a module or function to; None where it did not.

    It is an object of its own for each call of torch.compile.
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
    """Return the name of the module that a frame's function is of; empty where it has none."""
    return frame.f_globals.get("__name__") or ""


def _compiler(module: torch.nn.Module) -> str | None:
    """Return the name of the backend that a compiled module was given to."""
    return getattr(backend_of(module), "compiler_name", None)


def _name(module: torch.nn.Module) -> str:
    return type(getattr(module, "_orig_mod", module)).__name__
