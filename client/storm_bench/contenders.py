"""Ways to compute one case, on tensors that all ways share: how they are timed and shown.

A way that cannot run here is a text with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Contender", "cells", "seconds_of", "skipped"]

Contender: TypeAlias = "Callable[[], Any] | str"
"""The call that is timed, or the reason why it cannot run."""


def skipped(error: Exception) -> dict[str, str]:
    """Return the row of a way that has failed: others' code may raise any exception."""
    return {"skipped": f"{type(error).__name__}: {str(error)[:200]}"}


def seconds_of(work: Callable[[], object], device: str, calls: int = 1) -> float:
    """Return the seconds per call of `calls` calls in a row; on a GPU its events measure them."""
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - started) / calls
    import torch

    event: Any = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def cells(row: dict[str, Any], ratio: str) -> str:
    """Return a way's microseconds, its multiple under the key `ratio`, and its memory, as text."""
    if "skipped" in row:
        return f"left out: {row['skipped']}"
    text = f"{row['seconds'] * 1e6:>12.1f}"
    if ratio in row:
        text += f" {row[ratio]:>8.3f}x"
    if row.get("peak_bytes"):
        text += f" {row['peak_bytes'] / (1 << 30):>8.3f} GiB"
    return text
