"""A lane's work as named NVTX ranges for profilers, as in `nsys profile stormd serve`.

Without a profiler, a range costs one read of a module's variable, and no text is made. A range ends
with its `with` block, also if the block raises.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

__all__ = ["nvtx_range"]

_NSYS: Final = "NVTX_INJECTION64_PATH"
"""The variable that NVIDIA's profilers set for the programs they start, for NVTX to find them."""

_nothing: Final = nullcontext()


def nvtx_range(what: str, nbytes: int, number: int) -> AbstractContextManager[object]:
    """Return a context that a profiler shows as the range `stormd WHAT #NUMBER, NBYTES B`."""
    if _nvtx is None:
        return _nothing
    return _Range(f"stormd {what} #{number}, {nbytes} B")


class _Range:
    """A range; its GPU work is the work that is queued on a stream inside it."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _nvtx.RangePush(self._name)

    def __exit__(self, *_: object) -> None:
        _nvtx.RangePop()


def _found() -> Any:
    """Return CuPy's NVTX if a profiler is attached, else None."""
    if _NSYS not in os.environ:
        return None
    try:
        return importlib.import_module("cupy.cuda.nvtx")
    except ImportError:
        return None


_nvtx: Any = _found()
