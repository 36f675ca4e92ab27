"""Warns of a model that is compiled as a whole, which offload makes no smaller.

All that such a graph has saved is asked for at its backward's first moment: the graph takes its
saved tensors as arguments. Blocks that are compiled one by one are asked for one by one.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable

import torch

__all__ = ["HANDLED", "CompiledModels", "may_be_compiled"]


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
            if is_compiled(module):
                self._said = True
                warnings.warn(
                    f"{_name(module)} is compiled as a whole: its backward pass begins by asking "
                    "for all that was saved, so offload does not lower the peak; compile its "
                    "blocks instead, as in `for block in model.layers: block.compile()`",
                    RuntimeWarning,
                    stacklevel=3,
                )


def may_be_compiled(modules: Iterable[torch.nn.Module]) -> bool:
    """Tell whether something that a step runs may be compiled: of the modules, or of the process.

    PyTorch keeps a list of the backends of all that was handed to torch.compile.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and any(
        backend is not None for backend in dynamo.cached_backends.values()
    ):
        return True
    return any(is_compiled(part) for module in modules for part in module.modules())


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether calling `module` calls what torch.compile made, by either of its spellings."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _name(module: torch.nn.Module) -> str:
    return type(getattr(module, "_orig_mod", module)).__name__
