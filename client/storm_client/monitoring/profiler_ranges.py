"""Names for profilers: the client's actions, as ranges in `nsys` and in torch.profiler's traces.

Without a profiler, a range costs one check of a flag, and no text is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Final

import torch

__all__ = ["is_profiling", "span"]

_NSYS: Final = "NVTX_INJECTION64_PATH"
"""Set by NVIDIA's profilers in the environment of the processes they start, for NVTX."""

_listening: Final = _NSYS in os.environ
_nothing: Final = nullcontext()
_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # torch's gap


def is_profiling() -> bool:
    """Return whether a profiler is listening."""
    return _listening or bool(_profiler_enabled())


def span(what: str, nbytes: int, number: int = 0) -> AbstractContextManager[object]:
    """Return a context that is the range `storm WHAT #NUMBER, NBYTES B` to a profiler."""
    if not is_profiling():
        return _nothing
    return _reported_range(f"storm {what} #{number}, {nbytes} B")


@contextmanager
def _reported_range(name: str) -> Iterator[None]:
    """Report a range to NVTX and to torch's own profiler."""
    with ExitStack() as entered:
        if _listening and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
            entered.enter_context(torch.cuda.nvtx.range(name))
        entered.enter_context(torch.profiler.record_function(name))
        yield
