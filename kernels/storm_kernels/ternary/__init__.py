"""Computes on ternary tensors: values of -1, 0 and 1, stored as two bit planes.

`encode` and `decode` convert to and from planes; `dot`, `matvec` and `matmul` compute on them.
`TernaryTensor` stores planes with a shape and scales. All accept NumPy arrays and torch tensors, on
the CPU and on CUDA. `storm_kernels.ternary.nn`, which needs torch, has the layers. DESIGN.md
specifies the bits of planes and the order of float additions, and lists measurements.
"""

from __future__ import annotations

from ..errors import BackendUnavailable, CorruptBlob, UsageError
from .api import decode, dot, encode, matmul, matvec, pack, unpack
from .tensor import TernaryTensor

__all__ = [
    "BackendUnavailable",
    "CorruptBlob",
    "TernaryTensor",
    "UsageError",
    "decode",
    "dot",
    "encode",
    "matmul",
    "matvec",
    "pack",
    "unpack",
]
