"""The training thread's latest costs: of offloading one tensor, of recomputing one operation.

The time of the hooks differs by a factor of ten among hosts, and decides whether a forward pass is
CPU-bound. So it is measured in steps that follow their plan. Only the thread's processor time
counts: waiting is time of the link or of the daemon, for which plans have other figures.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

__all__ = ["FEWEST", "LATEST", "ThreadCosts"]

LATEST: Final = 64
"""Tensors whose costs are remembered, in each direction."""

FEWEST: Final = 16
"""Tensors that must be measured in each direction before the costs are used."""


class ThreadCosts:
    """Of one Offload. Any thread may note a cost: both methods are a deque's, implemented in C."""

    def __init__(self) -> None:
        stores: deque[float] = deque(maxlen=LATEST)
        restores: deque[float] = deque(maxlen=LATEST)
        self._both = stores, restores
        self.stored = stores.append
        """Notes the seconds for one tensor that was stored."""
        self.restored = restores.append
        """Notes the seconds for one tensor that was restored."""
        self.recompute: float | None = None
        """Seconds for recomputing one operation, by compiled code; None if not measured yet."""

    def store(self) -> float | None:
        """Return the seconds for one tensor, both ways; None if too few were measured."""
        both = [list(one) for one in self._both]  # copied in C, while others append
        if min(map(len, both)) < FEWEST:
            return None
        return sum(float(np.median(one)) for one in both)
