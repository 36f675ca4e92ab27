"""Names for profilers: what a lane does, as NVTX ranges in `nsys profile stormd serve`.

Where no profiler is attached a range costs one look at a module's variable, and no text is made. A
range ends where it was begun, also when what is inside raises.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

__all__ = ["nvtx_range"]

_NSYS: Final = "NVTX_INJECTION64_PATH"
"""What NVIDIA's profilers set in the environment of what they start, for NVTX to find them."""

_nothing: Final = nullcontext()


def nvtx_range(what: str, nbytes: int, number: int) -> AbstractContextManager[object]:
    """Return a context that is the range `stormd WHAT #NUMBER, NBYTES B` to a profiler."""
    if _nvtx is None:
        return _nothing
    return _Range(f"stormd {what} #{number}, {nbytes} B")


class _Range:
    """A range; its work on the GPU is what is put on a stream inside it."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _nvtx.RangePush(self._name)

    def __exit__(self, *_: object) -> None:
        _nvtx.RangePop()


def _found() -> Any:
    """Return CuPy's NVTX where a profiler listens, else None."""
    if _NSYS not in os.environ:
        return None
    try:
        return importlib.import_module("cupy.cuda.nvtx")
    except ImportError:
        return None


_nvtx: Any = _found()
