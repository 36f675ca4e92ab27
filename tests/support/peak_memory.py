"""How much more of PyTorch's memory on a CPU a call has in use at some time than before it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most that allocations of a call, less what was freed, came to."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    taken = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in taken), default=0)
