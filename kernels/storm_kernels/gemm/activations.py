"""The activations of gated products, by name; the kernels follow PyTorch's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from .jobs import ACTIVATIONS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["activate", "check_activation"]


def check_activation(name: str) -> None:
    """Raise UsageError if no activation has this name."""
    if name == "none" or name not in ACTIVATIONS:
        known = ", ".join(repr(one) for one in ACTIVATIONS if one != "none")
        raise UsageError(f"activation {name!r} is unknown; choose one of {known}")


def activate(name: str, x: Tensor) -> Tensor:
    """Return the named activation of x, as PyTorch computes it."""
    from torch.nn import functional

    check_activation(name)
    if name == "silu":
        return functional.silu(x)
    if name == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
