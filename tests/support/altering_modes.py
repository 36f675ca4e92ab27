"""Modes of a script that have PyTorch's functions return something else."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ALTERING", "Scaled", "ScaledBelow", "SteeperSlopes"]


class Scaled(TorchFunctionMode):
    """Halves what SiLU returns."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        return made * 0.5 if function is functional.silu else made


class ScaledBelow(TorchDispatchMode):
    """The same, below autograd."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        return made * 0.5 if function is torch.ops.aten.silu.default else made


class SteeperSlopes(TorchFunctionMode):
    """Has the other operations be the same: a leaky ReLU is given another number."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is functional.leaky_relu:
            return function(args[0], 0.5)
        return function(*args, **(kwargs or {}))


ALTERING = [Scaled, ScaledBelow]
