"""How much device memory offloading itself may take: sources not yet let go, tensors back early.

What stays true: one limit bounds what is held after a store, and it holds three of the largest
tensors seen, so that the link has work while a long kernel makes nothing to store; what is brought
back early may besides take half of the memory that the step has used before and has free again; no
choice passes the ceiling; and running out of memory halves it all. Pure: the caller measures.
"""

from __future__ import annotations

__all__ = ["Window"]

START_BYTES = 5 << 28
"""Limit to begin with: what a PCIe 5 link moves, encoded, in 17 ms, a long kernel's time."""

LARGEST = 3
"""How many of the largest tensors the limit holds. With 32768 tokens, where attention computes for
30 ms and saves little, the link stood still for 8 ms a layer with two."""

LEAST_BYTES = 1 << 26
"""However little memory there is, some tensors must be under way for the link to be busy."""


class Window:
    """Of one session; its lock protects it."""

    def __init__(self, ceiling: int) -> None:
        """Never choose more than `ceiling` bytes."""
        self._ceiling = ceiling
        self.limit = min(START_BYTES, self._ceiling)
        """Bytes of sources that may be held after they were stored."""

    def saw(self, nbytes: int) -> None:
        """Note the size of a tensor that is stored in place."""
        self.limit = min(self._ceiling, max(self.limit, LARGEST * nbytes))

    def ahead(self, headroom: int) -> int:
        """Return how many bytes may be brought back early.

        `headroom` is by how many bytes less is allocated now than was at the most.
        """
        return min(self._ceiling, max(self.limit, headroom // 2))

    def shrink(self) -> None:
        """Take half from now on: the device has run out of memory."""
        self._ceiling = max(min(LEAST_BYTES, self._ceiling), self._ceiling // 2)
        self.limit = min(self.limit, self._ceiling)
