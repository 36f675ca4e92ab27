"""Tensors that lie in poisoned memory, so that a test sees what was written around them."""

from __future__ import annotations

import torch

GUARD = 64  # elements on either side
POISON = 0xA5


class Guarded:
    """An uninitialised dense tensor between guards, at any offset from an aligned address."""

    def __init__(self, like: torch.Tensor, offset: int = 0) -> None:
        size = like.numel()
        self._memory = torch.empty(size + 2 * GUARD + offset, dtype=like.dtype, device=like.device)
        self._bytes().fill_(POISON)
        self._begin = GUARD + offset
        strides = torch.empty_like(like).stride()
        self.tensor = self._memory.as_strided(like.shape, strides, self._begin)

    def check(self) -> None:
        """Raise AssertionError where a guard was changed."""
        before = self._memory[: self._begin].view(torch.uint8)
        after = self._memory[self._begin + self.tensor.numel() :].view(torch.uint8)
        assert (before == POISON).all(), "memory before the tensor was written"
        assert (after == POISON).all(), "memory behind the tensor was written"

    def _bytes(self) -> torch.Tensor:
        return self._memory.view(torch.uint8)
