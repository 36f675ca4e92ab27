"""Kernels for stormd: ANCF, associative scans and ternary products, on NumPy, C and CUDA.

Importing this package loads neither torch, CuPy nor CUDA.
"""

from __future__ import annotations

from .backends import BackendInfo, backends
from .errors import BackendUnavailable, CorruptBlob, KernelsError, UsageError

__all__ = [
    "BackendInfo",
    "BackendUnavailable",
    "CorruptBlob",
    "KernelsError",
    "UsageError",
    "backends",
]
