"""Warns of a model that is compiled as a whole, which offload makes no smaller.

All that such a graph has saved is asked for at its backward's first moment: the graph takes its
saved tensors as arguments. Blocks that are compiled one by one are asked for one by one.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable
from typing import Final

import torch

from storm_client.layers import parts_of

__all__ = ["HANDLED", "CompiledModels", "CompiledParts", "may_be_compiled"]

LOOK_EVERY: Final = 64
"""In one of so many steps a model's modules are looked through, which takes up to a millisecond."""


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


def may_be_compiled(modules: Iterable[torch.nn.Module]) -> bool:
    """Tell whether something that a step runs may be compiled: of the modules, or of the process.

    PyTorch keeps a list of the backends of all that was handed to torch.compile.
    """
    return _was_compiled() or any(is_compiled(part) for part in parts_of(modules))


class CompiledParts:
    """The same for each step of an Offload. Threads may share it.

    What is handed to torch.compile is known at once. Only who has PyTorch forget that, by
    torch._dynamo.reset, may have compiled modules that are found some steps later.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._has_any = False

    def may_run(self, modules: Iterable[torch.nn.Module]) -> bool:
        """Tell whether something that a step runs may be compiled."""
        if _was_compiled():
            return True
        if not self._steps % LOOK_EVERY:
            self._has_any = may_be_compiled(modules)
        self._steps += 1
        return self._has_any


def _was_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(
        backend is not None for backend in dynamo.cached_backends.values()
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
