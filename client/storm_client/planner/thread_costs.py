"""What offloading one tensor has cost the thread that trains of late.

How long hooks take differs by a factor of ten among hosts, and decides whether a forward pass is
CPU-bound. So it is measured where steps follow their plan. Counted is the thread's processor time:
what a thread waits for is the link's time, or the daemon's, which plans have figures of.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

__all__ = ["FEWEST", "LATEST", "ThreadCosts"]

LATEST: Final = 64
"""Tensors of which the costs are remembered, each way."""

FEWEST: Final = 16
"""Tensors that have to have gone each way before their costs say something."""


class ThreadCosts:
    """Of one Offload. Any thread may tell of a cost: both methods are a deque's, written in C."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        stores: deque[float] = deque(maxlen=LATEST)
        restores: deque[float] = deque(maxlen=LATEST)
        self._both = stores, restores
        self.stored = stores.append
        """Notes the seconds for one tensor that was stored."""
        self.restored = restores.append
        """Notes the seconds for one tensor that was restored."""

    def seconds(self) -> float | None:
        """Return the seconds for one tensor, both ways; None where too few were measured."""
        both = [list(one) for one in self._both]  # copied in C, while others append
        if min(map(len, both)) < FEWEST:
            return None
        return sum(float(np.median(one)) for one in both)
