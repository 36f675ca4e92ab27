"""Another number of threads that share PyTorch's functions on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["omp_threads", "one_thread", "one_thread_more"]

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def omp_threads() -> int:
    """Return among how many threads OpenMP shares work that this thread begins."""
    return int(ctypes.CDLL(str(_LIBRARY)).omp_get_max_threads())


@contextmanager
def one_thread() -> Iterator[None]:
    """Have no work be shared in this thread, and in others once PyTorch has shared some there."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread_more() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
