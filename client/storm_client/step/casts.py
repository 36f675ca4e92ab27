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
        self._of_update: int | None = None
        """The value of the cast that was kept at the last update, while it is kept."""
        self._is_kept = False

    def look(self) -> None:
        """Look for the cast of an earlier update, before a capture drops all casts."""
        found, value = self._cast()
        if found == value:
            self._of_update = None
        self._is_kept = found is not None and found == self._of_update

    def check(self) -> None:
        """Note that there is an update now.

        Raises:
            UsageError: the cast of an earlier update was found, or no block ends the casts.
        """
        if _keeps_casts() and not _is_in_block():
            raise UsageError(
                "autocast is on without a block that ends, so PyTorch keeps the weights as they "
                "were first cast; enter torch.autocast in the step instead of "
                "torch.set_autocast_enabled"
            )
        if self._is_kept:
            raise UsageError(
                "the step is called again within one autocast block, in which PyTorch keeps the "
                "weights as the first step cast them; enter autocast in the step, or anew for "
                "each call"
            )
        self._of_update, _ = self._cast()

    def _cast(self) -> tuple[int | None, int]:
        """Change the weight; return what a cast in the block gives, if there is one, and the value.

        Outside of a block, where most steps run, this does nothing.
        """
        if not (_keeps_casts() and _is_in_block()):
            return None, 0
        with torch.no_grad():
            value = (int(self._weight) + 1) % _VALUES
            self._weight.fill_(value)
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            return int(torch.mm(self._weight, self._one)), value


def _keeps_casts() -> bool:
    is_on = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    return is_on and torch.is_autocast_cache_enabled()


def _is_in_block() -> bool:
    """Return whether an autocast block is entered, at whose end PyTorch drops the casts."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
