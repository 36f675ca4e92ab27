"""Detects several updates within one autocast block, which keeps its first casts of the weights.

PyTorch's cache of casts ends with the outermost block. So a second step in the same block computes
with the weights as they were before the first one's update. A captured step casts them anew.
"""

from __future__ import annotations

import torch

from storm_client.errors import UsageError

__all__ = ["CastProbe"]

_VALUES = 251
"""The probe has one of so many values in turn, which are exact in half precision."""


class CastProbe:
    """A weight of one number, which is cast in each step that runs in an autocast block."""

    def __init__(self) -> None:
        self._weight = torch.zeros(1, 1, requires_grad=True)
        self._one = torch.ones(1, 1)

    def check(self) -> None:
        """Cast the weight after changing it.

        Raises:
            UsageError: the cast of an earlier step was found.
        """
        if not (_is_in_block() and torch.is_autocast_cache_enabled()):
            return
        with torch.no_grad():
            value = (int(self._weight) + 1) % _VALUES
            self._weight.fill_(value)
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            found = torch.mm(self._weight, self._one)
        if int(found) != value:
            raise UsageError(
                "the step is called again within one autocast block, in which PyTorch keeps the "
                "weights as the first step cast them; enter autocast in the step, or anew for "
                "each call"
            )


def _is_in_block() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
